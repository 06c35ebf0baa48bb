"""Rounds of an optimizer's buckets: each is pushed once per round, when its last gradient is complete.

| state of a bucket | event                                            | action                   | next      |
|-------------------|--------------------------------------------------|--------------------------|-----------|
| filling           | ``fill``: a gradient, not the last one           | copy it into the arena   | filling   |
| filling           | ``fill``: the last gradient; or ``push_rest()``  | copy it, push the bucket | in flight |
| in flight         | ``fill``                                         | ``PacelineError``        | in flight |
| in flight         | answered, and ``settle()``                       | end the round            | filling   |

Gradients are copied into the arena when they are complete, so pushes are sent while backward still runs. No server
reads or writes the arena between ``settle`` and the next push.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from paceline.errors import PacelineError
from paceline.kvstore.dist import DistStore
from paceline.net.call import Call
from paceline.optim.binding import Bound, take_all
from paceline.optim.device import Pusher
from paceline.tensors import real_view
from paceline.worker.block import BucketRange, WorkerBlock

BucketKey = tuple[int, int]
"""Number of the block, and index of the bucket in it."""


class Exchange:
    """Pushes the buckets of one optimizer's parameters, once each per round, and waits for the answers.

    Args:
        store: the store to push to.
        before_round: called before the first push of a round.
        before_push: called with the parameters of a bucket before they are pushed, when their gradients are in the
            arena; returns whether the update of this round must be skipped.
        again: advice for the error about a gradient that is computed after its push.
        before_fill: called with each parameter before its gradient is copied into the arena. The arena's value is
            still that of the last round.
    """

    def __init__(
        self,
        store: DistStore,
        before_round: Callable[[], None],
        before_push: Callable[[Sequence[Bound]], bool],
        again: str,
        before_fill: Callable[[Bound], None] = lambda one: None,
    ) -> None:
        self._store, self._before_round, self._again = store, before_round, again
        self._before_push, self._before_fill = before_push, before_fill
        self.bound: list[Bound] = []
        self._blocks: dict[int, WorkerBlock] = {}
        self._members: dict[BucketKey, list[Bound]] = {}
        self._pusher = Pusher(store.session.settings.timeout_s)
        self._new_round()

    def _new_round(self) -> None:
        self._calls: dict[BucketKey, Call | None] = {}
        """The pushes of this round, by bucket; None while gradients are copied from a device."""
        self._copies: dict[BucketKey, list[torch.cuda.Event]] = {}
        self._filled: set[Bound] = set()
        self._missing = {key: len(members) for key, members in self._members.items()}
        self._deferred = False

    def add(self, bound: Sequence[Bound]) -> None:
        """Add parameters; between rounds."""
        self.bound += bound
        for one in bound:
            self._blocks[one.block.spec.block] = one.block
            for part in one.ranges:
                self._members.setdefault((one.block.spec.block, part.bucket), []).append(one)
        self._new_round()

    @property
    def blocks(self) -> list[WorkerBlock]:
        """The blocks that hold the parameters."""
        return list(self._blocks.values())

    @property
    def started(self) -> bool:
        """Whether a bucket of this round was pushed."""
        return bool(self._calls)

    def fill(self, one: Bound) -> None:
        """Copy a complete gradient into the arena, and push its bucket if that is complete.

        Raises:
            PacelineError: its bucket was pushed already.
        """
        keys = [(one.block.spec.block, part.bucket) for part in one.ranges]
        if any(key in self._calls for key in keys):
            raise PacelineError(
                f"worker {self._store.rank}: parameter {one.name!r} got another gradient after its push. {self._again}"
            )
        again = one in self._filled
        self._put(one)
        for key in keys if not again else ():
            self._missing[key] -= 1
            if self._missing[key] == 0:
                self._push(key)

    def _put(self, one: Bound) -> None:
        self._store.session.check_process()  # before a child writes to the arena of its parent
        self._before_fill(one)
        copy = one.put_grad()
        self._filled.add(one)
        if copy is not None:
            for part in one.ranges:
                self._copies.setdefault((one.block.spec.block, part.bucket), []).append(copy)

    def push_rest(self) -> None:
        """Push the remaining buckets, last layer first, with the current gradients."""
        for key in reversed(self._members):
            if key not in self._calls:
                for one in self._members[key]:
                    if one not in self._filled:
                        self._put(one)
                self._push(key)

    def _push(self, key: BucketKey) -> None:
        if not self._calls:
            self._before_round()
        copies = self._copies.get(key, [])
        self._calls[key] = None
        self._deferred = self._deferred or bool(copies)
        if not self._deferred:
            self._send(key)
            return
        what = f"worker {self._store.rank}: the gradients of {self._members[key][0].name!r}"
        self._pusher.after(partial(_all_done, copies), partial(self._send, key), what)

    def _send(self, key: BucketKey) -> None:
        block, bucket = self._blocks[key[0]], key[1]
        skip = self._before_push(self._members[key])
        none = self._store.traffic.samples == 0  # gradients of no samples count nothing, and may be NaN
        absent = [
            (block, part)
            for one in self._members[key]
            if one.absent or none
            for part in one.ranges
            if part.bucket == bucket
        ]
        whole = BucketRange(bucket, 0, block.layout.buckets[bucket].length)
        self._calls[key] = self._store.traffic.push_ranges(
            block.routes[bucket], [(block, whole)], want=True, absent=absent, skip=skip
        )

    def settle(self) -> None:
        """Wait for all answers of this round, and end it. Then the arena holds the new values."""
        self._pusher.drain()
        try:
            self._store.session.wait([call for call in self._calls.values() if call is not None])
        finally:
            self._new_round()

    def broadcast_weights(self) -> None:
        """Set the weights of all workers and servers to rank 0's; between rounds. Every worker calls it."""
        names = [one.name for one in self.bound]
        self._store.barrier()  # the arena may be written only after all workers have read the last round's values
        if self._store.rank == 0:
            self._store.set_values(names, [real_view(one.param.data) for one in self.bound])
        self._store.barrier()
        self._store.traffic.refresh(self._store.table.plan(tuple(names)))
        take_all(self.bound, weights=True)
        self._store.barrier()

    def refresh_weights(self) -> None:
        """Copy the values of the arena to the weights: a pull may have brought newer ones."""
        take_all(self.bound, weights=True)

    @property
    def filled(self) -> list[Bound]:
        """The parameters whose gradients are in the arena in this round, whether pushed or not."""
        return [one for one in self.bound if one in self._filled]


def _all_done(copies: Sequence[torch.cuda.Event]) -> bool:
    return all(copy.query() for copy in copies)  # type: ignore[no-untyped-call]
