"""Batches from one queue: all workers take from it, each as fast as it is."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils.data import Sampler

from paceline.data.deadline import Accumulates, Deadline, accumulate, check_deadline
from paceline.data.fetching import Dealing, fetched_ahead
from paceline.data.ledger import State, epoch_order, left_of
from paceline.data.partition import check_epoch, length_of
from paceline.errors import DeadlineError, PacelineError
from paceline.hetero import split_evenly
from paceline.hetero.sample_pool import WalkStart, positions
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.layout.ranges import Ranges, cut, everything, without
from paceline.wire import messages as m
from paceline.worker import notice
from paceline.worker.joining import Part
from paceline.worker.session import Session

_log = logging.getLogger(__name__)

#: Round that no worker gets to.
_NEVER = 2**62

#: Time after which a worker that waits for samples says once which workers hold them.
_QUIET_S = 10.0

#: Longest time that another worker trains on one shard. Those that die or stall are noticed long before.
_LONGEST_SHARD_S = 24 * 3600.0


class PooledBatchSampler(Sampler[list[int]]):
    """Batches from one queue of an epoch's samples, for ``DataLoader(batch_sampler=...)`` without workers.

    For stores whose workers go on at their own speed: each takes its next batch when it has trained on the last one. So
    fast workers train on more samples, all samples count alike, and an epoch ends for all at the same time. Each sample
    is trained on once per epoch: the samples held by a worker that leaves the job go to the others. ::

        sampler = paceline.data.PooledBatchSampler(data, store, batch_size=32)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)

    A batch counts as trained on when the loop asks for the next one, or has ended. A worker that finds only samples
    that others hold waits until they have trained on them; servers do not wait for it until the next epoch begins.

    Each iteration is the next epoch; :meth:`set_epoch` chooses one. All workers iterate equally often. A worker that
    leaves its loop early gives back a batch that it has not pushed for; the others finish the epoch, and if all leave
    it, the next one begins. A loop that is left before its first push has only looked: the same epoch comes again.

    The order of the samples follows from (``seed``, ``epoch``); their division among workers does not. There is no
    length: how many batches a worker gets depends on the others.

    :meth:`state_dict` continues in mid-epoch, with another number of workers or batch size too. With ``stop_every`` all
    workers' loops end together in the middle of an epoch, to save; the next iteration goes on with it::

        while sampler.next_epoch < 10:
            for x, y in loader:
                ...
            extra = {"sampler": sampler.state_dict()}
            paceline.save("job.ckpt", net, optimizer, step=step, extra=extra)

    With ``deadline_s`` a worker stops to compute at that time since its step began, pushes the gradients so far, and
    gives the other samples back to the pool, so that a slow batch delays nobody. The loop takes its parts from
    :meth:`parts_in_time`::

        for x, y in loader:
            optimizer.zero_grad()
            for x_part, y_part in sampler.parts_in_time(optimizer, x, y):
                loss_fn(model(x_part), y_part).backward()
            optimizer.step()

    Args:
        data: the data set or its length.
        store: a distributed store, but not ``dist_sync``, whose workers need equally many batches
            (:class:`SharedBatchSampler` gives these), and not ``dist_gsync`` with a bound.
        batch_size: batch size of this worker; the last batches of an epoch may be smaller.
        shuffle: without it, samples keep their order and every epoch is the same.
        seed: 0 or more, the same on all workers.
        name: name of the pool; samplers of the same name share it, and each iteration of one of them is the next epoch.
            Samplers of other data need a name of their own.
        max_batch: samples of a part, which fit into this worker's memory at once; by default the whole batch.
        deadline_s: seconds after which a worker begins no further part of a step; it needs ``max_batch``.
        stop_every: samples of all workers together after which an iteration ends; by default at the end of the epoch.

    Raises:
        ValueError: a store of another type, a batch size or ``stop_every`` below 1, no data, a negative seed, a
            deadline without ``max_batch``, or another sampler of that name with other data or settings.
    """

    def __init__(
        self,
        data: int | Sized,
        store: KVStoreBase,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        name: str = "samples",
        max_batch: int | None = None,
        deadline_s: float | None = None,
        stop_every: int | None = None,
    ) -> None:
        self._length = length_of(data)
        least = min(batch_size, self._length, 1 if stop_every is None else stop_every, seed + 1)
        if least < 1:
            raise ValueError(
                f"{self._length} samples, batch_size {batch_size}, stop_every {stop_every}, seed {seed}: 1, 1, 1 and 0 "
                "are the least"
            )
        if deadline_s is not None:
            check_deadline(deadline_s, max_batch)
        self._max_batch = max_batch or batch_size
        self._deadline = None if deadline_s is None else Deadline(deadline_s, time.monotonic)
        self._batch_size = batch_size
        limit = 0 if stop_every is None else min(stop_every, self._length)
        settings: State = {"length": self._length, "seed": seed, "shuffle": shuffle}
        self._session = session_of(store)
        self._walker = walker_of(self._session, name, settings, limit)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that comes next when none has begun.

        A process that takes over from a worker that has died joins the job here.
        """
        self._session.joining.join()
        return self._walker.epoch

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration. With ``stop_every`` it may be the one under way."""
        self._session.joining.join()
        return self._walker.following.epoch

    def __len__(self) -> NoReturn:
        """Raise: the number of this worker's batches is not known yet.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a pool has no length: how many batches a worker gets depends on the others. All workers together train on "
            f"{self._length} samples per epoch; count these, or batches"
        )

    def __bool__(self) -> bool:
        """Return True, as objects without a length do."""
        return True

    def __iter__(self) -> Iterator[list[int]]:
        """Hand out batches until every sample of the next epoch is trained on by some worker.

        Raises:
            ValueError: a ``DataLoader`` fetches batches ahead; or the other workers go on with another state, epoch or
                seed.
        """
        if fetched_ahead():
            raise ValueError(
                "a DataLoader with num_workers > 0 takes batches from a pool before they are trained on, so those of a "
                "worker that dies would be lost. Give it num_workers=0, or take SharedBatchSampler, which knows what "
                "was fetched ahead"
            )
        self._session.joining.check_joined()
        walk = self._walker.begin()
        order = epoch_order(epoch=self.epoch, **self._walker.settings)
        with Dealing(self) as dealing:
            try:
                while (held := self._walker.take(walk, self._batch_size)) is not None:
                    if self._deadline is not None:
                        self._deadline.begin_step()
                    batch = [int(order[position]) for position in positions(held)]
                    dealing.deal(len(batch))
                    yield batch
            except GeneratorExit:
                self._walker.stop(walk)
                raise

    def parts_in_time(self, optimizer: Accumulates, *batch: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Cut a batch into parts of at most ``max_batch``; with ``deadline_s`` only as many as there is time for.

        After the last one the gradients are the mean over the samples done, ``optimizer.samples`` is their number,
        and the rest is given back. A step must follow.

        Args:
            optimizer: a :class:`paceline.DistributedOptimizer` that does not overlap; its gradients are zero.
            batch: tensors with the samples of this worker's batch along their first dimension.
        """
        length = len(batch[0])
        sizes = split_evenly(length, [1.0] * -(-length // self._max_batch))
        done = yield from accumulate(optimizer, batch, sizes, self._deadline, contextlib.nullcontext)
        optimizer.samples = done
        _, rest = cut(self._walker.held, done)
        if rest:
            self._walker.give_back(rest)

    # ---- state -----------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, on all workers. If a part of it comes next, it goes on with that part.

        Raises:
            ValueError: the epoch is negative.
        """
        self._walker.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return where the epoch stands, for all workers: plain numbers, fit for JSON.

        ``left`` are the ranges of positions in the epoch's order that no worker has trained on. A sample is trained on
        when a push of its worker has followed. Of this worker that is known; of others it is known up to their last
        request for samples, and up to the last barrier. So a state is exact, and the same on all workers, when an
        iteration has ended for all; and in the middle of one between a barrier and the next batch of any worker::

            store.barrier()
            extra = {"sampler": sampler.state_dict()}
            paceline.save("job.ckpt", net, optimizer, step=step, extra=extra)

        A state that one worker takes while others train counts the batches that they hold as not trained on: at most
        one batch per other worker is then trained on twice, if the saved weights have it already, and none is lost. A
        warning names these workers. Weights that are read later than the state have more than it says, those that are
        read before it have less. Between ``backward`` and ``step``, or when gradients are accumulated over several
        batches, samples that were not pushed count as not trained on.

        It asks the scheduler, and waits for no other worker.
        """
        return self._walker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken: the next iteration hands out exactly the remaining samples.

        All workers load the same state, and may be more or fewer than then. If they load different ones, the first
        batch of one of them raises a ``ValueError``. A state of :class:`SharedBatchSampler` will do, too.

        Raises:
            ValueError: in mid-epoch the data, seed and ``shuffle`` must be the same as then. The sampler is unchanged.
        """
        self._walker.load_state_dict(state)


def session_of(store: KVStoreBase) -> Session:
    """Return the session of a store whose workers may take from a pool.

    Raises:
        ValueError: they need equally many batches, or there is one worker.
    """
    if not isinstance(store, DistStore):
        raise ValueError("a pool of samples needs a distributed store; a single process has nobody to share it with")
    policy = store.policy
    if policy.merge == "all" or (policy.merge == "groups" and policy.bound is not None):
        raise ValueError(
            f"a {store.type} store{' with a bound' if policy.bound is not None else ''} has no pool: its workers need "
            "equally many batches. SharedBatchSampler gives them, in proportion to their speed if wanted"
        )
    return store.session


class Walker:
    """Takes samples of a pool for one worker. Samplers of one name share it.

    Args:
        settings: ``length``, ``seed`` and ``shuffle``: the order of an epoch follows from them.
        limit: samples of all workers after which a walk is over; 0: the end of the epoch.
        by_push: a push after samples were taken says that they are trained on. Otherwise only the next request or
            :meth:`finish` says it: a sample stands for a shard, which takes many pushes.
    """

    def __init__(self, session: Session, name: str, settings: State, limit: int, *, by_push: bool = True) -> None:
        self._session, self._name, self.settings, self.limit = session, name, settings, limit
        self._by_push = by_push
        self._length: int = settings["length"]
        order = 1 + settings["seed"] % 2**62 if settings["shuffle"] else 0
        self.following = WalkStart(limit=limit, order=order)
        """The next walk."""
        self.start = self.following
        """The walk under way, or the last one."""
        self.held: Ranges = ()
        """Positions that were taken last."""
        self._walk, self._number = -1, 0
        self._begun = self._before = 0
        """Last rounds that were pushed before the walk, and before the last request."""
        self._is_chosen = False
        """Whether the next walk was chosen."""
        self._returned = False
        """Whether all of the walk that was begun last was given back, so that it comes again."""
        session.joining.add(f"pool {name}", Part(self._standing, self._stand))

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that comes next when none has begun or another one was chosen."""
        return self.following.epoch if self._walk < 0 or self._is_chosen or self._returned else self.start.epoch

    # ---- a walk ----------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Begin the next walk; returns its number."""
        if not (self._returned and self.following == self.start):
            self._walk += 1
        self.start, self.following = self.following, self.following.following(self._length)
        self._is_chosen = self._returned = False
        self._begun = self._session.round
        return self._walk

    def take(self, walk: int, count: int, shard_at: Callable[[int], str] | None = None) -> Ranges | None:
        """Take samples; None when the walk is over, or another one was begun since.

        While it waits for samples that others hold, no server waits for this worker's pushes. ``shard_at`` returns the
        shard that a position stands for, for the log.
        """
        if walk != self._walk:
            return None
        notice.batch()
        start, self._before = self.start, self._session.round if self._by_push else _NEVER
        request = m.TakeSamples(
            self._name, self._length, self._number + 1, walk, count, self._number, self._before,
            start.epoch, list(start.left), start.limit, start.order,
        )  # fmt: skip
        try:
            samples = self._call(request)
        except ValueError:  # the start of the walk differs from that of the others
            self._walk, self.following = walk - 1, start
            raise
        self._number += 1
        if samples.waits:
            self._session.stores.go_away()
            samples = self._wait(shard_at)
        self._session.stores.come_back(samples.phase)
        self.held = tuple(samples.ranges)
        return None if samples.over else self.held

    def _call(self, request: m.TakeSamples) -> m.PoolSamples:
        samples = self._session.call_scheduler(request, f"samples of pool {self._name!r}")
        assert isinstance(samples, m.PoolSamples)
        return samples

    def _wait(self, shard_at: Callable[[int], str] | None) -> m.PoolSamples:
        """Wait for samples that other workers hold. After a while one line of the log names these workers."""
        session = self._session
        limit_s = session.settings.timeout_s if self._by_push else _LONGEST_SHARD_S
        advice = "; if a batch takes as long here, raise PACELINE_TIMEOUT_S" if self._by_push else ""
        call = session.ask_scheduler(m.AwaitSamples(self._name), f"samples of pool {self._name!r}")
        waited_s = 0.0
        for until_s in sorted({min(_QUIET_S, limit_s), limit_s}):
            with contextlib.suppress(DeadlineError):
                session.wait([call], until_s - waited_s)
            if call.done:
                assert isinstance(call.body, m.PoolSamples)
                return call.body
            waited_s = until_s
            text = f"worker {session.rank} has waited {waited_s:g} s for {call.what}: {self._holders(shard_at)}"
            if waited_s < limit_s:
                _log.warning(text)
        raise DeadlineError(f"{text}{advice}")

    def _holders(self, shard_at: Callable[[int], str] | None) -> str:
        """Return which workers hold samples, how many or which shards, and for how long."""
        found = self._session.call_scheduler(m.AskSamples(self._name, self._session.round), f"pool {self._name!r}")
        assert isinstance(found, m.SamplesLeft)
        texts = []
        for rank, ranges, seconds in found.held:
            held = positions(tuple(ranges))
            named = f"{len(held)} samples" if shard_at is None else ", ".join(map(shard_at, held))
            texts.append(f"worker {rank} has held {named} for {seconds:.0f} s")
        return "; ".join(texts) or "no other worker holds any"

    def finish(self) -> None:
        """Say that the samples that were taken last are trained on."""
        self.held = ()
        done = m.ReturnSamples(self._name, self._number, [], _NEVER + 1)
        self._session.call_scheduler(done, f"end of samples of pool {self._name!r}")

    def give_back(self, rest: Ranges) -> None:
        """Give back samples that were taken last, and will not be trained on."""
        for start, stop in rest:
            self.held = without(self.held, start, stop)
        self._session.call_scheduler(self._return_of(rest), f"return of samples to pool {self._name!r}")

    def stop(self, walk: int) -> None:
        """Leave a walk before it is over: what no push has followed goes back to the pool.

        A walk that was left before any push comes again.
        """
        if walk != self._walk or self._session.has_left or not self._session.is_own:
            return
        round = self._session.round
        if round == self._begun and not self._is_chosen:
            self.following, self._returned = self.start, True
        rest = self.held if round <= self._before else ()
        self.held = ()
        with contextlib.suppress(PacelineError):  # the loop may have been left because the job has failed
            self._session.ask_scheduler(self._return_of(rest), f"return of samples to pool {self._name!r}")

    def _return_of(self, rest: Ranges) -> m.ReturnSamples:
        return m.ReturnSamples(self._name, self._number, list(rest), self._session.round)

    # ---- joining ---------------------------------------------------------------------------------------------------

    def _standing(self) -> None:
        """Return nothing: the scheduler knows where the walk is."""

    def _stand(self, there: None) -> None:
        """Go on with the walk of the others."""
        found = self._session.call_scheduler(m.AskSamples(self._name, self._session.round), f"pool {self._name!r}")
        assert isinstance(found, m.SamplesLeft)
        if found.is_known:
            self._walk = found.walk - 1
            self.start = replace(self.following, epoch=found.first_epoch, left=tuple(found.first_left))
            self.following = self.start

    # ---- state -----------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; if a part of it comes next, it goes on with that part."""
        epoch = check_epoch(epoch)
        self._choose(epoch, self.following.left if epoch == self.following.epoch else ())

    def state_dict(self) -> State:
        """Return the epoch, the positions of it that are not trained on yet, and the settings."""
        epoch, left = self._rest()
        return {"epoch": epoch, "left": [list(one) for one in left]} | self.settings

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a state."""
        self._choose(*left_of(state, self.settings))

    def _choose(self, epoch: int, left: Ranges) -> None:
        """Set the start of the next walk."""
        self.following = replace(self.following, epoch=epoch, left=() if left == everything(self._length) else left)
        self._is_chosen = True

    def _rest(self) -> tuple[int, Ranges]:
        """Return the epoch, and the positions of it that are not trained on yet."""
        found = self._session.call_scheduler(m.AskSamples(self._name, self._session.round), f"pool {self._name!r}")
        assert isinstance(found, m.SamplesLeft)
        own = self._walk + (not (self._returned and self.following == self.start))
        if not found.is_known or (self._is_chosen and found.walk < own):
            return self.following.epoch, self.following.positions(self._length)
        if found.held:
            _log.warning(
                "in the state of pool %r, the batches that workers %s hold count as not trained on; call "
                "store.barrier() on all workers before state_dict()",
                self._name, ", ".join(str(rank) for rank, *_ in found.held),
            )  # fmt: skip
        return found.epoch, tuple(found.left) or everything(self._length)


def walker_of(session: Session, name: str, settings: State, limit: int, *, by_push: bool = True) -> Walker:
    """Return this worker's side of a pool. The arguments are those of :class:`Walker`.

    Raises:
        ValueError: another sampler has the name for other data, or another order.
    """
    found = session.walkers.setdefault(name, Walker(session, name, settings, limit, by_push=by_push))
    assert isinstance(found, Walker)
    if (found.settings, found.limit) != (settings, limit):
        raise ValueError(
            f"this worker has a pool {name!r} with {found.settings} and stop_every={found.limit or None}; a sampler "
            f"with {settings} and stop_every={limit or None} cannot share it; give it a name of its own: name='...'"
        )
    return found
