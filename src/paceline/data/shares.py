"""Batches of unequal size: each worker computes its share of every global batch."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from paceline.data.deadline import Accumulates, Deadline, accumulate, check_deadline, check_prefetch
from paceline.data.fetching import Dealing, fetched_ahead
from paceline.data.ledger import DealingLog, GlobalBatch, HandedOut, State, epoch_order, place_of
from paceline.data.partition import check_epoch, fractions_of, length_of
from paceline.data.speeds import MOST_STEPS, Speeds, lock_step_of
from paceline.hetero import Shares, Speed, split_evenly
from paceline.hetero.batch_shares import columns_of
from paceline.kvstore.base import KVStoreBase
from paceline.worker import notice
from paceline.worker.joining import Part

_log = logging.getLogger(__name__)

_numbers = itertools.count()

_FETCHED_AHEAD = "their DataLoader fetches batches ahead: nobody can join where these are dealt; give it num_workers=0"

#: Global batches that are remembered, beside those fetched ahead: more than may be handed out between two exchanges.
_REMEMBERED = MOST_STEPS + 4


class SharedBatchSampler(Sampler[list[int]]):
    """A worker's part of every global batch, for ``DataLoader(batch_sampler=...)``: unequal machines get unequal parts.

    Two lines make a job balance itself (LB-BSP, Chen et al. 2020)::

        sampler = paceline.data.SharedBatchSampler(data, store, global_batch_size=96, shares="measured")
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)

    The order of the whole data set follows from (``seed``, ``epoch``) and is cut into global batches; each is divided
    among the workers. So every sample is trained on once per epoch, with any shares. All workers get the same number of
    batches. The last global batch of an epoch may be smaller. Where it has fewer samples than there are workers, the
    workers without one compute a sample of the epoch's beginning, to which :class:`paceline.DistributedOptimizer` gives
    no weight. Other front doors do not weigh: ``drop_last`` leaves such a batch out. An iteration that is left before a
    backward pass, as ``next(iter(loader))`` to see a shape, has only looked, where a
    :class:`paceline.DistributedOptimizer` trains: the same epoch comes again.

    With ``measured``, the others take over from a worker that leaves or dies in the middle of an epoch: they share the
    global batches from the next revision on, and the samples that it has not trained on until then come at the end
    of the epoch, in as many more batches as needed; if a loader had fetched all batches of the epoch by then, in
    the next epoch. This counts one push per batch. With other shares it is left out, unless there is a ``deadline_s``.

    With ``measured``, the time between two batches, less the time spent waiting for the store, is a step's computation.
    All workers exchange their speeds and divide the next global batches so that all finish at the same time. The
    global batch never changes. The loss must be a mean over the local batch, and gradients be weighted by samples, as
    :class:`paceline.DistributedOptimizer` does; ``gluon.Trainer.step`` takes the global batch size.

    With ``deadline_s`` a slow step delays nobody: a worker stops to compute at that time since its step began, and
    pushes the gradients so far, weighted by samples. The rest comes at the end of the epoch. Two lines again::

        sampler = paceline.data.SharedBatchSampler(
            data, store, global_batch_size=96, shares="measured", max_batch=4, deadline_s=0.5
        )
        for x, y in torch.utils.data.DataLoader(data, batch_sampler=sampler):
            optimizer.zero_grad()
            for x_part, y_part in sampler.parts_in_time(optimizer, x, y):
                loss_fn(model(x_part), y_part).backward()
            optimizer.step()

    Args:
        data: the data set or its length.
        store: the job's store.
        global_batch_size: samples of all workers together.
        shares: ``equal``; ``measured`` (``dist_sync`` only); a fraction per worker; or a file of MXNet-G's data
            sharding, whose spans are taken as fractions of each batch.
        shuffle: without it, samples keep their order and every epoch is the same.
        seed: 0 or more, the same on all workers.
        drop_last: leave out a last global batch that is smaller.
        prefetch: batches that the loader fetches ahead. Of a ``DataLoader`` with workers they are known, once it is
            iterated: ``num_workers * prefetch_factor``.
        max_batch: samples that fit into this worker's memory at once. Its share may be larger; :meth:`parts` cuts it,
            and each further part costs the fixed time of a step, which ``measured`` takes into account.
        deadline_s: seconds after which a worker begins no further part of a step (``dist_sync`` only, the same on all
            workers). It needs :meth:`parts_in_time`, ``max_batch`` as the size of a part, and a loader that fetches
            nothing ahead: samples that were not done come back in the same epoch.

    Raises:
        ValueError: there are fewer samples than workers; ``measured`` or ``deadline_s`` with a store whose workers go
            on at their own speed, as these would have to wait for each other to agree; or ``deadline_s`` without
            ``max_batch`` or with ``prefetch``.
        paceline.errors.ConfigError: the file cannot be used.
    """

    def __init__(
        self,
        data: int | Sized,
        store: KVStoreBase,
        *,
        global_batch_size: int,
        shares: str | os.PathLike[str] | Sequence[float] = "equal",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = 0,
        max_batch: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self._length = length_of(data)
        self._rank, self._num_workers = store.rank, store.num_workers
        self._drop_last, self._prefetch, self._max_batch = drop_last, prefetch, max_batch
        self._settings: State = {"length": self._length, "seed": seed, "shuffle": shuffle}
        self._check(global_batch_size, deadline_s)
        self._measures = shares == "measured"
        dist = lock_step_of(store, self._measures, deadline_s)
        self._session = None if dist is None else dist.session
        if self._session is not None and self._measures:
            self._session.trains(has_measured_shares=True)
        exchanges = self._measures or deadline_s is not None
        self._speeds = Speeds(
            dist if exchanges else None, self._rank, self._num_workers, max_batch, deadline_s is not None
        )
        self._shares = Shares(global_batch_size, fractions_of(shares, self._num_workers), self._speeds.caps)
        self._now: Callable[[], float] = time.monotonic
        self._deadline = None if deadline_s is None else Deadline(deadline_s, self._now)
        self._done: tuple[int, int] | None = None
        """Samples and parts of the step under way that were done, where that is known."""
        self._counts = True
        """Whether the samples of the step under way count: they are none that the epoch has had."""
        self._epoch, self._row, self._first, self._pending = 0, 0, 0, True
        self._handed_out = HandedOut(self._length)
        name, is_logged = f"shared {next(_numbers)}", dist is not None and dist.policy.merge == "all"
        self._log: DealingLog | None = None
        if dist is not None and is_logged and deadline_s is None:
            self._log = DealingLog(dist.session, name, self._settings)
        self._is_handed_out = self._has_joined = False
        """Whether the last epoch was walked to its end, and whether this worker has joined since the last iteration."""
        self._begun = 0, 0
        """Batch and index at which the last iteration began."""
        self._dealing: Dealing | None = None
        """The last iteration, as far as it is known what the loop has got of it."""
        if dist is not None:
            dist.session.joining.add(name, Part(self._standing, self._stand))

    # ---- questions -------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that comes next when none has begun.

        A process that takes over from a worker that has died joins the job here.
        """
        if self._session is not None:
            self._session.joining.join(self._speeds.are_exchanged)
        return self._epoch

    @property
    def shares(self) -> dict[int, int]:
        """Samples of each global batch, by worker."""
        return dict(self._shares.samples)

    @property
    def speeds(self) -> dict[int, Speed]:
        """The known speeds of the workers; with ``measured``, those of all workers."""
        return self._speeds.known

    def __len__(self) -> int:
        """Number of batches in an epoch in which no worker leaves, dies or runs out of time."""
        size = self._shares.global_batch
        return self._length // size if self._drop_last else -(-self._length // size)

    def parts(self, *batch: torch.Tensor) -> list[tuple[float, tuple[torch.Tensor, ...]]]:
        """Cut a batch into parts that fit into this worker's memory, as few and as even as possible.

        Each comes with its weight: its part of the samples. Accumulate ``weight * loss`` of all parts::

            parts = sampler.parts(x, y)
            for number, (weight, (x, y)) in enumerate(parts, start=1):
                with optimizer.no_sync() if number < len(parts) else contextlib.nullcontext():
                    (weight * loss_fn(model(x), y)).backward()

        Args:
            batch: tensors with the samples of this worker's share along their first dimension.
        """
        length = len(batch[0])
        sizes = split_evenly(length, [1.0] * self._passes(length))
        cuts = [torch.split(tensor, sizes) for tensor in batch]
        return [(size / length, tuple(cut[number] for cut in cuts)) for number, size in enumerate(sizes)]

    def _passes(self, samples: int) -> int:
        return 1 if self._max_batch is None else -(-samples // self._max_batch)

    def parts_in_time(self, optimizer: Accumulates, *batch: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Cut a batch into parts that fit into memory; with ``deadline_s`` only as many as there is time for.

        After the last one the gradients are the mean over the samples done, and ``optimizer.samples`` is their number.
        All workers agree on the samples left for later, so each must take the parts to the end, and step after them.

        Args:
            optimizer: a :class:`paceline.DistributedOptimizer` with ``update="worker"``; its gradients are zero.
            batch: tensors with the samples of this worker's share along their first dimension.
        """
        length = len(batch[0])
        sizes = split_evenly(length, [1.0] * self._passes(length))
        counts = self._counts
        done = yield from accumulate(optimizer, batch, sizes, self._deadline, optimizer.no_sync)
        optimizer.samples = done if counts else 0
        self._done = done, next(number for number, stop in enumerate(itertools.accumulate(sizes), 1) if stop == done)
        if self._deadline is not None:
            self._speeds.note_done(done)

    # ---- an epoch --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        """Hand out this worker's part of every global batch of the next epoch."""
        self._begin(fetched_ahead())
        order, sizes = self._order(), deque[int]()
        round, position = self._round(), self._handed_out.position
        self._handed_out.begin(self._prefetch + _REMEMBERED)
        with Dealing(self) as self._dealing:
            while self._has_batch():
                first, length = self._first, self._handed_out.length
                columns = columns_of(self._shares.samples, length - first)
                start, stop = columns[self._rank]
                sizes.append(stop - start)
                begun, waited = self._now(), self._waited()
                self._row, round = self._row + 1, round + 1
                self._first = min(first + self._shares.global_batch, length)
                self._handed_out.add(GlobalBatch(round, first, length, columns))
                if self._log is not None:
                    size, odd = self._shares.global_batch, self._odd(order, first)
                    self._log.note(round, self._epoch, first, size, columns, odd)
                self._done = None
                self._speeds.begin_step()
                if self._deadline is not None:
                    self._deadline.begin_step()
                is_last = not self._has_batch()  # now, as a state that one worker takes lets samples come again there
                self._counts = first + start < length
                self._dealing.deal(stop - start if self._counts else 0)
                yield [int(order[position((first + column) % length)]) for column in range(start, stop)]
                notice.batch()  # before the exchange: it shows the others that this worker has left
                if len(sizes) > self._prefetch:
                    size = sizes.popleft()
                    done, passes = self._done or (size, self._passes(size))
                    self._speeds.measure(done, passes, self._now() - begun - (self._waited() - waited))
                # After the last batch too: it may show that somebody is gone, and then it was not the last one.
                gone = self._speeds.end_step(self._shares.samples, is_last)
                self._leave_for_later()
                self._follow(gone)
                self._welcome()
        self._is_handed_out = True

    def _begin(self, ahead: int) -> None:
        """Begin the next epoch, or go on with one, with the speeds of all workers."""
        if self._session is not None:
            self._session.joining.check_joined()
        if self._deadline is not None:
            check_prefetch(ahead)
        self._prefetch = max(self._prefetch, ahead)
        self._speeds.why_shut = _FETCHED_AHEAD if self._prefetch else ""
        self._take_back()
        if self._is_handed_out and not self._prefetch:
            self._handed_out.begin(0)  # all workers have asked for more after the last batch: it was trained on
        if not self._has_joined:  # else it was let in where the others are
            self._follow(self._speeds.gather())
        if not self._pending:
            self._next_epoch()
        self._pending = self._is_handed_out = self._has_joined = False
        self._begun = self._row, self._first
        self._welcome()

    def _odd(self, order: NDArray[np.int64], first: int) -> list[int]:
        """Return the samples of a global batch that do not simply follow from the order: the last ones of an epoch."""
        size, length = self._shares.global_batch, self._handed_out.length
        if first + size <= self._length:
            return []
        columns = columns_of(self._shares.samples, length - first)
        stop = max(stop for _, stop in columns.values())
        return [int(order[self._handed_out.position((first + column) % length)]) for column in range(stop)]

    def _order(self) -> NDArray[np.int64]:
        return epoch_order(epoch=self._epoch, **self._settings)

    def _next_epoch(self) -> None:
        """Begin an epoch with samples that the last one could not repeat: its loader had fetched all batches before."""
        late = self._handed_out.rest(self._first) if self._is_handed_out and self._has_batch() else []
        before = self._order()
        self._epoch, self._row, self._first, self._handed_out.again = self._epoch + 1, 0, 0, []
        if late:
            place = {int(sample): position for position, sample in enumerate(self._order())}
            self._handed_out.again = [place[int(before[position])] for position in late]
            _log.warning(
                "%d samples of epoch %d come in epoch %d: a worker was lost when %d batches were fetched ahead; with "
                "num_workers=0 they would have come in the same epoch",
                len(late), self._epoch - 1, self._epoch, self._prefetch,
            )  # fmt: skip

    def _take_back(self) -> None:
        """Let an iteration that has only looked come again."""
        if not self._pending and self._dealing is not None and self._dealing.has_only_looked:
            (self._row, self._first), self._pending = self._begun, True
            self._handed_out.begin(0)

    def _has_batch(self, more: int = 0) -> bool:
        left = self._handed_out.length + more - self._first
        return left >= (self._shares.global_batch if self._drop_last else 1)

    # ---- speeds ----------------------------------------------------------------------------------------------------

    def _waited(self) -> float:
        return 0.0 if self._session is None else self._session.waited_s

    def _round(self) -> int:
        return 0 if self._session is None else self._session.round

    def _follow(self, gone: Collection[int] | None) -> None:
        """Follow the speeds of an exchange, without the workers that are gone; None: there was no exchange."""
        if gone is None:
            return
        for worker in gone:
            self._lose(worker)
        if self._measures:
            present = self._shares.samples
            self._shares.revise({worker: speed for worker, speed in self._speeds.told.items() if worker in present})

    def _welcome(self) -> None:
        """Let those step with this worker that the last exchange has let in."""
        if self._session is not None:
            for worker in (*self._session.came, *self._speeds.present):
                self._shares.join(worker)
            self._session.welcome()

    def _leave_for_later(self) -> None:
        """Let the rest of the workers' parts of the last global batch come once more."""
        for worker, done in self._speeds.done().items():
            self._handed_out.cut_short(worker, done)

    def _lose(self, worker: int) -> None:
        """Share the global batches without a worker that has left or died."""
        assert self._session is not None
        self._speeds.forget(worker)
        if worker in self._shares.samples:
            last = self._session.gone.get(worker, 0)
            self._handed_out.again += self._handed_out.missing(worker, last, self._handed_out.length)
            self._shares.leave(worker)

    # ---- state -----------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. An epoch that was loaded by :meth:`load_state_dict` keeps its position.

        Raises:
            ValueError: the epoch is negative.
        """
        epoch = check_epoch(epoch)
        self._take_back()
        if not (self._pending and epoch == self._epoch):
            self._epoch, self._row, self._first, self._pending = epoch, 0, 0, True
            self._handed_out.again = []
            self._handed_out.begin(0)

    def state_dict(self) -> State:
        """Return where the epoch stands: plain numbers, the same on all workers, fit for JSON.

        Batches that the loader has fetched ahead count as not handed out. With ``measured`` or ``deadline_s``, so do
        the untrained samples of a worker that has died. Others know of it at the first barrier after the death; so take
        the state after ``store.barrier()`` if workers may die.
        """
        self._take_back()
        if self._session is None or self._round() >= self._handed_out.last_round:
            self._leave_for_later()
        missing = self._missing(self._first)
        is_over = not self._has_batch(len(missing))
        ahead = self._ahead(is_over)
        done = is_over and not ahead
        first = self._handed_out.first_of_last(ahead)
        row, first = (0, 0) if done else (self._row - ahead, self._first if first is None else first)
        again = [*self._handed_out.again, *(self._missing(first) if ahead else missing)]
        shares = [self._shares.samples.get(one, 0) for one in range(self._num_workers)]
        where: State = {"epoch": self._epoch + done, "batch": row, "shares": shares}
        where |= {"first": first} if first != row * self._shares.global_batch else {}
        where |= {"again": again} if again and not done else {}
        return where | self._settings | {"drop_last": self._drop_last, "global_batch_size": self._shares.global_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; workers and global batch may be others.

        A state of :class:`PooledBatchSampler` will do, too.

        Raises:
            ValueError: in mid-epoch the data, seed and ``shuffle`` must be the same as then. The sampler is unchanged.
        """
        place = place_of(state, self._settings)
        self._epoch, self._row, self._first, self._pending = place.epoch, place.row, place.first, True
        self._handed_out.begin(0)
        self._handed_out.again, shares = place.again, place.shares
        fits = len(shares) == self._num_workers and sum(shares) == self._shares.global_batch and min(shares) > 0
        if self._measures and fits:
            self._shares = Shares(self._shares.global_batch, shares, self._speeds.caps)

    def _standing(self) -> State:
        """Return where this worker stands between two batches, for one that joins there."""
        place = {"epoch": self._epoch, "row": self._row, "first": self._first, "again": list(self._handed_out.again)}
        place |= {"pending": self._pending, "over": self._is_handed_out, "samples": dict(self._shares.samples)}
        return place | {"speeds": self._speeds.state()}

    def _stand(self, there: State | None) -> None:
        if there is None:
            return
        self._epoch, self._row, self._first = there["epoch"], there["row"], there["first"]
        self._handed_out.again = list(there["again"])
        self._speeds.stand(there["speeds"])
        self._shares.stand(there["samples"], self._speeds.told)
        self._is_handed_out, self._has_joined = there["over"], not (there["pending"] or there["over"])
        self._pending = there["pending"] or self._has_joined

    def _ahead(self, is_over: bool) -> int:
        """Return how many of the batches that were handed out the loop does not have yet."""
        walk = None if self._dealing is None else self._dealing.loaded
        if self._pending or (walk is None and is_over):
            return 0
        return min(self._prefetch, self._row) if walk is None else self._row - self._begun[0] - walk.batches

    def __getstate__(self) -> State:
        return self.__dict__ | {"_dealing": None}

    def _missing(self, stop: int) -> list[int]:
        """Return the positions before an index that workers had that are gone, which no revision has noticed yet."""
        if self._session is None or self._pending or not (self._measures or self._deadline):
            return []
        gone = [(worker, last) for worker, last in self._session.gone.items() if worker in self._shares.samples]
        return [position for worker, last in gone for position in self._handed_out.missing(worker, last, stop)]

    def _check(self, global_batch_size: int, deadline_s: float | None) -> None:
        seed = self._settings["seed"]
        if seed < 0 or (self._max_batch is not None and self._max_batch < 1):
            raise ValueError(f"seed is {seed}, max_batch {self._max_batch}; 0 and 1 are the least")
        if self._length < max(1, global_batch_size if self._drop_last else self._num_workers):
            raise ValueError(f"{self._length} samples are not enough for a batch of all {self._num_workers} workers")
        if deadline_s is None:
            return
        check_deadline(deadline_s, self._max_batch)
        check_prefetch(self._prefetch)
