"""Pushing gradients: each bucket leaves when its last gradient has appeared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from paceline.errors import PacelineError
from paceline.kvstore.block import Stretch, WorkerBlock
from paceline.kvstore.dist import DistStore
from paceline.optim.binding import Bound
from paceline.optim.device import Pusher
from paceline.roles.session import Ticket

_BucketKey = tuple[int, int]


class Reducer:
    """Pushes the buckets of one optimizer's parameters, once each per round.

    Args:
        store: where to.
        bound: the parameters.
        passes: backward passes that make one round.
        before_round: called before the first push of a round.
        values_are_weights: what the store answers are the new weights, and not merged gradients.
    """

    def __init__(
        self,
        store: DistStore,
        bound: Sequence[Bound],
        passes: int,
        before_round: Callable[[], None],
        values_are_weights: bool,
    ) -> None:
        self._store, self._bound, self._passes, self._before_round = store, bound, passes, before_round
        self._values_are_weights = values_are_weights
        self._blocks: dict[int, WorkerBlock] = {one.block.spec.block: one.block for one in bound}
        self._members: dict[_BucketKey, list[Bound]] = {}
        for one in bound:
            for bucket in one.buckets:
                self._members.setdefault((one.block.spec.block, bucket), []).append(one)
        self.tickets: dict[_BucketKey, Ticket | None] = {}
        """The pushes of the last round, by bucket; None while gradients are on their way from a device."""
        self._pusher = Pusher(store.session.settings.timeout_s)
        self._copies: dict[_BucketKey, list[torch.cuda.Event]] = {}
        self._arrived: dict[Bound, int] = {}
        self._missing: dict[_BucketKey, int] = {}
        self._pushed: set[_BucketKey] = set()
        self._new_round()

    def _new_round(self) -> None:
        self._arrived = dict.fromkeys(self._bound, 0)
        self._missing = {key: len(members) for key, members in self._members.items()}
        self._copies = {}
        self._pushed = set()

    @property
    def started(self) -> bool:
        """Whether a bucket of this round has left."""
        return bool(self._pushed)

    def attach(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Push from hooks that run when a gradient is complete."""
        return [
            one.param.register_post_accumulate_grad_hook(self._hook_of(one))  # type: ignore[no-untyped-call]
            for one in self._bound
        ]

    def _hook_of(self, one: Bound) -> Callable[[torch.Tensor], None]:
        return lambda param: self.arrive(one)

    def arrive(self, one: Bound) -> None:
        """Note that a parameter's gradient of one backward pass is complete.

        Raises:
            PacelineError: it was pushed already.
        """
        self._arrived[one] += 1
        if self._arrived[one] > self._passes:
            raise PacelineError(
                f"parameter {one.name!r} got another gradient after its push; call optimizer.step() after every "
                f"{self._passes} backward pass(es), or set backward_passes_per_step"
            )
        last = self._arrived[one] == self._passes
        if last or one.side is None:  # what accumulates on a device leaves it once
            self._take(one)
        if not last:
            return
        for bucket in one.buckets:
            key = (one.block.spec.block, bucket)
            self._missing[key] -= 1
            if self._missing[key] == 0:
                self._push(key)

    def _take(self, one: Bound) -> None:
        """Bring a gradient into the arena when the last round has left it."""
        self.wait(one)
        copy = one.take_grad()
        if copy is not None:
            for bucket in one.buckets:
                self._copies.setdefault((one.block.spec.block, bucket), []).append(copy)

    def _push(self, key: _BucketKey) -> None:
        if not self._pushed:
            # What the last round's pushes weigh, and their options, stay until the last of them has left.
            self._pusher.drain()
            self._before_round()
        self._pushed.add(key)
        copies = self._copies.get(key, [])
        if not copies and None not in self.tickets.values():
            self._send(key)
            return
        self.tickets[key] = None
        what = f"worker {self._store.rank}: the gradients of {self._members[key][0].name!r}"
        self._pusher.after(partial(_all_done, copies), partial(self._send, key), what)

    def _send(self, key: _BucketKey) -> None:
        block = self._blocks[key[0]]
        bucket = block.layout.buckets[key[1]]
        whole = Stretch(key[1], 0, bucket.length)
        self.tickets[key] = self._store.traffic.push_stretches(block.ways[key[1]], [(block, whole)], want=True)

    def finish(self) -> None:
        """Push what has not left yet, last layer first; gradients that did not appear count as zero."""
        for key in reversed(self._members):
            if key not in self._pushed:
                for one in self._members[key]:
                    if self._arrived[one] < self._passes:
                        self._take(one)
                self._push(key)
        self._new_round()

    def wait(self, one: Bound) -> None:
        """Wait for the last round's answers on one parameter: its arena is free, its value is new."""
        self._wait_for((one.block.spec.block, bucket) for bucket in one.buckets)

    def wait_all(self) -> None:
        """Wait for all answers of the last round."""
        self._wait_for(list(self.tickets))

    def _wait_for(self, keys: Iterable[_BucketKey]) -> None:
        keys = [key for key in keys if key in self.tickets and key not in self._pushed]
        if not keys:
            return
        if any(self.tickets[key] is None for key in keys):
            self._pusher.drain()
        self._store.session.wait([ticket for key in keys if (ticket := self.tickets[key]) is not None])
        done = set()
        for key in keys:
            del self.tickets[key]
            done.update(self._members[key])
        for one in done if self._values_are_weights else ():
            if not any((one.block.spec.block, bucket) in self.tickets for bucket in one.buckets):
                one.give_value()


def _all_done(copies: Sequence[torch.cuda.Event]) -> bool:
    return all(copy.query() for copy in copies)  # type: ignore[no-untyped-call]
