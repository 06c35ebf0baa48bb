"""Exchanges: a front door gives them gradients, and gets back their merge, or new weights.

| call                   | what happens                                                                  |
|------------------------|-------------------------------------------------------------------------------|
| ``fill(parameter)``    | its gradient is complete and is copied; True: there is something to push      |
| ``push(Carried(...))`` | complete gradients are sent, without waiting; it may run while backward does  |
| ``push_rest(...)``     | all other gradients are copied and sent; once per round                       |
| ``settle()``           | all answers are waited for, and the round ends                                |
| ``take()``             | merged gradients, or new weights, are copied to the parameters                |

:class:`ServerExchange` pushes the buckets of an arena, and rows:

| state of a bucket | event                                                      | action                 | next      |
|-------------------|------------------------------------------------------------|------------------------|-----------|
| filling           | ``fill``: a gradient, not the last one                     | copy it into the arena | filling   |
| filling           | ``fill``: the last gradient                                | copy it                | ready     |
| ready             | ``push``                                                   | push the bucket        | in flight |
| ready             | ``push`` of the last bucket before ``Carried.after`` is done | none                 | held      |
| held              | ``push_rest``                                              | wait for them, push    | in flight |
| held, in flight   | ``fill``                                                   | ``PacelineError``      | the same  |
| in flight         | answered, and ``settle()``                                 | end the round          | filling   |

No server reads or writes the arena between ``settle`` and the next push.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from paceline.errors import NonFiniteError, PacelineError
from paceline.kvstore.dist import DistStore
from paceline.layout.local_merge import Route
from paceline.layout.tensors import real_view
from paceline.naming import listed
from paceline.net.call import Call, way_of
from paceline.observe import meter
from paceline.observe.account import COPY, DEVICE
from paceline.optim.binding import (
    WAY_OUT,
    Bound,
    bind_keys,
    changed_here,
    is_finite,
    known,
    merged_not_finite,
    not_finite_in,
    sums_up,
    take_all,
    unlike,
)
from paceline.optim.device import Pusher, SideStream, all_copied, side_stream
from paceline.optim.names import NamedParameter
from paceline.optim.sparse_exchange import SparseExchange, find_sparse
from paceline.updaters import Options
from paceline.wire import messages as m
from paceline.worker.traffic import Carried


class Exchange:
    """Gives this worker's gradients to all workers; this one, to no other. Base of all kinds.

    Attributes:
        merge: what is made of pushes: their ``mean``, in which numbers of samples decide how much each counts; their
            ``sum``; or an update of ``each``.
    """

    merge: Literal["mean", "sum", "each"] = "each"

    def add(self, named: Sequence[NamedParameter]) -> None:
        """Take in parameters, with rank 0's weights; between rounds. Every worker calls it."""

    def fill(self, param: torch.nn.Parameter) -> bool:
        """Take in a complete gradient, while backward runs; returns whether there is something to push."""
        return False

    def push(self, carried: Carried) -> None:
        """Send complete gradients. Does not wait."""

    def push_rest(self, carried: Carried) -> None:
        """Send all that was not sent in this round, with the current gradients."""

    def settle(self) -> None:
        """Wait for all answers of this round, and end it."""

    def take(self) -> None:
        """Copy the answers of the last round to the parameters."""

    def encoded(self, groups: Sequence[Options]) -> bytes:
        """Return the options of all param groups as pushes carry them."""
        return b""

    def mean_loss(self, loss: float, samples: float) -> float:
        """Return the mean of the workers' losses, weighted by samples; where gradients are summed, their sum."""
        return loss

    def suspicious(self) -> bool:
        """Return whether the answers of the last round may hold NaN or Inf: a cheap check. False is certain."""
        return True

    def blame(self, names: Sequence[str], round: int) -> NonFiniteError:
        """Return the error about merged gradients that are not finite. Every worker calls it in the same step."""
        return NonFiniteError(f"the gradient of {listed(map(repr, names))} is NaN or Inf; {WAY_OUT}")

    def broadcast_weights(self) -> None:
        """Set the weights of all workers to rank 0's. Every worker calls it."""

    def tell_step(self, step: int, weights: Mapping[str, torch.Tensor], batch: m.StepBatch | None) -> None:
        """Let somebody compare this worker's weights and batch of a step with those of the others. Does not wait."""


@dataclasses.dataclass(eq=False)
class _Bucket:
    """One bucket in the current round."""

    whole: m.Span
    route: Route
    members: list[Bound] = dataclasses.field(default_factory=list)
    unfilled: int = 0
    """Members whose gradients are not in the arena yet."""
    is_pushed: bool = False
    call: Call | None = None


class ServerExchange(Exchange):
    """Pushes each bucket of one optimizer's parameters once per round, when its last gradient is complete.

    Args:
        store: the parameters' store, whose updater is set.
        optimizer: the user's optimizer, and
        model: the network, if it is known: they tell whose gradients are sparse.
        update: answers are merged gradients (``worker``), or new weights (``server``).
        advice: the way out, for the error about a gradient that is computed after its push.
    """

    def __init__(
        self,
        store: DistStore,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        update: Literal["worker", "server"],
        advice: str = "",
    ) -> None:
        self._store, self._optimizer, self._model = store, optimizer, model
        self._brings_weights, self._advice = update == "server", advice
        self.sparse, self._has_rows = SparseExchange(store, [], update), False
        self.bound: dict[torch.nn.Parameter, Bound] = {}
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._buckets_of: dict[Bound, list[_Bucket]] = {}
        self._pusher = Pusher(store.session.settings.timeout_s)
        self.travel_s = 0.0
        """Seconds for which pushes and answers of the last round were on the way, or waited to be taken."""
        self._loss_store: DistStore | None = None
        weighs = store.policy.merge != "each" or store.policy.lr_scale == "sample"
        self.merge = ("mean" if store.lifecycle.mean else "sum") if weighs else "each"
        self._new_round()

    def add(self, named: Sequence[NamedParameter]) -> None:
        """Initialise keys for parameters, with rank 0's weights; between rounds. Every worker calls it."""
        store = self._store
        rows = find_sparse([(name, param) for name, param, _ in named], self._optimizer, self._model)
        if rows and self._brings_weights and store.policy.merge == "groups" and store.traffic.clip_norm:
            raise ValueError(f"clip_grad_norm in groups needs dense gradients, but {rows[0][0]!r} has sparse ones")
        self.sparse.add(rows)
        self._has_rows = self._has_rows or bool(rows)
        dense = [one for one in named if one[1] not in self.sparse]
        if not dense:
            return
        # Frozen parameters get buckets of their own, which may stay unpushed for a long time.
        tags = [2 * group * self._brings_weights + (not param.requires_grad) for _, param, group in dense]
        for one in bind_keys(store, [name for name, _, _ in dense], [param for _, param, _ in dense], tags):
            self.bound[one.param], self._buckets_of[one] = one, []
            for part in one.ranges:
                if part.place not in self._buckets:
                    whole = m.Span(*part.place, 0, one.block.layout.buckets[part.bucket].length)
                    self._buckets[part.place] = _Bucket(whole, one.block.routes[part.bucket])
                bucket = self._buckets[part.place]
                bucket.members.append(one)
                self._buckets_of[one].append(bucket)
        self._new_round()

    def _new_round(self) -> None:
        self._ready: list[_Bucket] = []
        self._held: _Bucket | None = None
        self._unpushed = len(self._buckets)
        self._sides: set[SideStream] = set()
        """Streams that copy or compare parameters in this round."""
        self._compared: list[tuple[Bound, torch.Tensor]] = []
        """Weights that their devices compare with those of the servers."""
        for one in self.bound.values():
            one.filled = False
        for bucket in self._buckets.values():
            bucket.unfilled, bucket.is_pushed, bucket.call = len(bucket.members), False, None

    # ---- a round ---------------------------------------------------------------------------------------------------

    def fill(self, param: torch.nn.Parameter) -> bool:
        """Copy a complete gradient into the arena; returns whether a bucket is complete.

        Raises:
            PacelineError: its bucket was pushed already; or the arena holds weights, and this one was changed since.
                Of a weight on a CUDA device :meth:`settle` raises that, because to ask here would wait for the device.
        """
        one = self.bound.get(param)
        if one is None:
            return False  # rows are pushed at the end
        self._store.session.check_process()  # before a child writes to the arena of its parent
        buckets = self._buckets_of[one]
        for bucket in buckets:
            if bucket.is_pushed:
                raise PacelineError(
                    f"worker {self._store.rank}: parameter {one.name!r} got another gradient after its push. "
                    f"{self._advice}"
                )
        if one.kind != (param.dtype, param.shape):
            raise one.converted()
        if self._brings_weights:
            self._check_unchanged(one)
        side = side_stream(param)
        if side is not None:
            self._sides.add(side)
        one.put_grad(side)
        for bucket in buckets:
            bucket.unfilled -= not one.filled
            if bucket.unfilled == 0 and not one.filled:
                self._ready.append(bucket)
        one.filled = True
        return bool(self._ready)

    def _check_unchanged(self, one: Bound) -> None:
        """Raise if the servers hold a weight that was changed here since they sent it."""
        found = unlike(one.param.data, one.value)
        if isinstance(found, torch.Tensor):
            self._compared.append((one, found))
        elif found:
            raise changed_here(self._store, one.name)

    def _check_compared(self) -> None:
        """Raise if a device has found that a weight was changed."""
        found = known([is_unlike for _, is_unlike in self._compared])
        for (one, _), is_unlike in zip(self._compared, found, strict=True):
            if is_unlike:
                raise changed_here(self._store, one.name)

    def push(self, carried: Carried) -> None:
        """Push the complete buckets."""
        ready, self._ready = self._ready, []
        is_earlier_done = carried.after is None or carried.after.advance()
        for bucket in ready:
            bucket.is_pushed = True
            self._unpushed -= 1
            if not (self._unpushed or is_earlier_done):
                self._held = bucket
            elif self._sides:
                self._send_later(bucket, carried)
            else:
                self._send(bucket, carried)

    def push_rest(self, carried: Carried) -> None:
        """Push the remaining buckets, last layer first, with the current gradients, and then the rows."""
        for bucket in reversed(self._buckets.values()):
            for one in bucket.members if bucket.unfilled else ():
                if not one.filled:
                    self.fill(one.param)
            if self._ready:
                self.push(carried)
        if carried.after is not None:
            carried.after.wait()
        if self._held is not None:
            (self._send_later if self._sides else self._send)(self._held, carried)
        for side in self._sides:
            side.join()  # from now on a loop may change gradients in place
        if self._has_rows:
            self.sparse.push_rest(carried)

    def _send_later(self, bucket: _Bucket, carried: Carried) -> None:
        """Send a bucket, once all of it is in host memory. Buckets are sent in the order of these calls."""
        copies = [side.mark() for side in self._sides]
        what = f"worker {self._store.rank}: the gradients of {bucket.members[0].name!r}"
        self._pusher.after(partial(all_copied, copies), partial(self._send, bucket, carried), what)

    def _send(self, bucket: _Bucket, carried: Carried) -> None:
        absent = []
        for one in bucket.members:
            if one.absent or carried.samples == 0:  # gradients of no samples count nothing, and may be NaN
                absent += [part for part in one.ranges if part.place == bucket.whole.place]
            elif carried.nan != "pass" and not carried.skip and not sums_up(one.grad):
                if carried.nan == "skip":
                    carried = dataclasses.replace(carried, skip=True)
                elif not is_finite(one.grad):
                    raise not_finite_in(self._store, one.name, carried.round)
        bucket.call = self._store.traffic.push_ranges(bucket.route, [bucket.whole], carried, absent=absent)

    def settle(self) -> None:
        """Wait for all answers of this round, and end it. Then the arena holds the new values.

        Raises:
            PacelineError: a weight on a CUDA device was changed; see :meth:`fill`.
        """
        if self._sides:
            before = meter.active.enter(DEVICE)
            self._pusher.drain()
            meter.active.leave(before)
        calls = []
        for bucket in self._buckets.values():
            if bucket.call is not None:
                calls.append(bucket.call)
        try:
            self._store.session.wait(calls)
            self.travel_s = way_of(calls, 0.0)
            if self._has_rows:
                self.sparse.settle()
            self._check_compared()
        finally:
            self._new_round()

    def take(self) -> None:
        """Copy new weights to the parameters, or merged gradients, where a worker had one, to their gradients."""
        before = meter.active.enter(COPY)
        take_all(self.bound.values(), weights=self._brings_weights)
        meter.active.leave(before)
        if self._has_rows:
            self.sparse.take()

    # ---- options that it carries, and errors that it finds ---------------------------------------------------------

    def encoded(self, groups: Sequence[Options]) -> bytes:
        """Return the options of all param groups as pushes carry them; the servers compare them between workers."""
        optimizer = self._store.optimizer
        optimizer.set_options(groups)
        return optimizer.encoded

    def suspicious(self) -> bool:
        """Return whether merged gradients of the last round may hold NaN or Inf. False is certain, True is not."""
        for block in self._store.table.blocks.values():
            if not sums_up(block.values):
                return True
        return self._has_rows and self.sparse.suspicious()

    def blame(self, names: Sequence[str], round: int) -> NonFiniteError:
        """Return the error about merged gradients that are not finite. All workers find them in the same step."""
        store = self._store
        own = [one.name for one in self.bound.values() if not one.absent and not is_finite(one.grad)]
        own += self.sparse.not_finite()
        found = store.session.gather(f"{store.name}/not finite", "\n".join(own[:100]).encode())
        pushed = {rank: text.decode().split("\n") for rank, text in enumerate(found) if text}
        return merged_not_finite(store.rank, names, round, pushed)

    def mean_loss(self, loss: float, samples: float) -> float:
        """Return the mean of the workers' losses, weighted by samples; where gradients are summed, their sum."""
        value = torch.tensor([loss], dtype=torch.float64, device="cpu")
        if self._loss_store is None:
            self._loss_store = self._store.sibling("loss", self._store.lifecycle.mean)
            self._loss_store.init("loss", torch.zeros_like(value))
        self._loss_store.samples = samples
        self._loss_store.pushpull("loss", value)
        return float(value)

    def broadcast_weights(self) -> None:
        """Set the weights of all workers and servers to rank 0's; between rounds. Every worker calls it."""
        store, bound = self._store, list(self.bound.values())
        names: list[Any] = [one.name for one in bound]
        store.barrier()  # the arena may be written only after all workers have read the last round's values
        if store.session.is_lead:
            store.set_values(names, [real_view(one.param.data) for one in bound])
        store.barrier()
        store.traffic.refresh(store.table.plan(tuple(names)))
        take_all(bound, weights=True)
        store.barrier()
        self.sparse.broadcast_weights()

    def tell_step(self, step: int, weights: Mapping[str, torch.Tensor], batch: m.StepBatch | None) -> None:
        """Let the scheduler compare what workers tell of a step, if there are several. Does not wait."""
        self._store.tell_step(self._store.name, step, weights, batch)

    def refresh_weights(self) -> None:
        """Copy the values of the arena to the weights: a pull may have brought newer ones."""
        take_all(self.bound.values(), weights=True)
