"""Which samples a worker trains on, epoch by epoch, disjoint from all other workers without a message."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from paceline.data.fetching import Dealing
from paceline.data.ledger import DealingLog, LeftOver, State, check_kind, check_settings, epoch_order
from paceline.data.partition import (
    Slots,
    check_epoch,
    check_part,
    check_span,
    column_slots,
    length_of,
    part_bounds,
    part_of,
    span_bounds,
    window_slots,
)
from paceline.wire import messages as m
from paceline.worker.current import joined_session

_numbers = itertools.count()


class ShardedSampler(Sampler[int]):
    """One worker's part of a data set, shuffled anew in every epoch.

    The order of the *whole* data set follows from (``seed``, ``epoch``) and is cut afterwards, so the parts of an
    epoch are disjoint, cover everything, and change from epoch to epoch. Every worker must use the same data, seed
    and epoch. A part is either ``part_index`` of ``num_parts`` equal ones, by default this worker's part, or a fraction
    ``span=(begin, end)`` (MXNet-G's data sharding, see :func:`paceline.data.read_spans`).

    By default all workers get the same number of batches, which lock-step modes need to end an epoch together:

    * equal parts are equally large: a part that would be one short borrows a sample (or all drop, ``drop_last``);
    * with ``global_batch_size``, the size of one batch of all workers together, each worker gets its part or span of
      *every* global batch: :attr:`batch_size` samples. This is how unequal spans keep the same number of batches.

    When a worker leaves under notice, or dies and the others go on, they train on the rest of its part at the end of
    the epoch, in as many more batches as needed, and on its part of later epochs: with ``global_batch_size`` and
    without a ``span``, in a job whose store has servers. After a death this counts one push per batch.

    ``even=False`` hands out exactly the part, whatever its size: for modes in which workers need not stay together.

    Each iteration is the next epoch; :meth:`set_epoch` chooses one. One that is left before a backward pass, as
    ``next(iter(loader))`` on rank 0 to see a shape, has only looked, where a :class:`paceline.DistributedOptimizer`
    trains: the same epoch comes again. :meth:`state_dict` continues in mid-epoch.

    Args:
        data: the data set or its length.
        num_parts: number of parts; by default the workers of the job, and 1 outside of a job.
        part_index: which of them; by default this worker's rank.
        span: a fraction of the data instead of ``num_parts`` and ``part_index``.
        shuffle: without it, samples keep their order and every epoch is the same.
        seed: 0 or more, the same on all workers.
        even: give every worker the same number of batches.
        drop_last: with ``even``, leave out what does not divide instead of repeating samples.
        global_batch_size: samples in one batch of all workers together; needed for a ``span`` with ``even``.

    Raises:
        ValueError: the part does not exist or would be empty, or arguments contradict each other.
    """

    def __init__(
        self,
        data: int | Sized,
        num_parts: int | None = None,
        part_index: int | None = None,
        *,
        span: tuple[float, float] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        even: bool = True,
        drop_last: bool = False,
        global_batch_size: int | None = None,
    ) -> None:
        self._length = length_of(data)
        self._span = span
        self._num_parts, self._part_index = part_of(num_parts, part_index) if span is None else (1, 0)
        self._shuffle, self._seed, self._even, self._drop_last = shuffle, seed, even, drop_last
        self._global_batch_size = global_batch_size
        self._check_arguments(has_part=num_parts is not None or part_index is not None)
        self._slots = self._cut()
        if not self._slots.size:
            raise ValueError(f"{self._part()} of {self._length} samples is empty; use fewer workers or a smaller batch")
        self._epoch, self._position = 0, 0
        self._pending = True  # the next iteration is this epoch, not the one after it
        self._begun = 0
        """Position at which the last iteration began."""
        self._dealing: Dealing | None = None
        """The last iteration, as far as it is known what the loop has got of it."""
        self._extra: list[int] = []
        """Samples of workers that are gone, on which this one trains after its part."""
        self._name = f"sharded {next(_numbers)}"
        self._left_over: LeftOver | None = None
        self._log: DealingLog | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that comes next when none has begun."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that were handed out."""
        return self._position

    @property
    def walks_all(self) -> bool:
        """Whether this part is the whole data set."""
        return self._span is None and self._num_parts == 1

    @property
    def batch_size(self) -> int | None:
        """This worker's samples in each global batch; None without ``global_batch_size``."""
        if self._global_batch_size is None:
            return None
        start, stop = self._bounds(self._global_batch_size)
        return stop - start

    def __len__(self) -> int:
        """Number of samples in this worker's epoch."""
        return int(self._slots.size)

    def __iter__(self) -> Iterator[int]:
        """Hand out the indices of the next epoch one by one."""
        indices = self._begin()
        self._dealing = Dealing(self, len(self) + len(self._extra) - self._position)
        for position in range(self._position, len(self)):
            self._position = position + 1
            yield int(indices[position])
        while self._has_more():
            self._position += 1
            yield self._extra[self._position - 1 - len(self)]

    def index_batches(self, batch_size: int, drop_last: bool = False) -> Iterator[torch.Tensor]:
        """Hand out the indices of the next epoch in tensors of ``batch_size`` (the last may be smaller), int64.

        Raises:
            ValueError: ``batch_size`` is below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        return self._walk(batch_size, drop_last)

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return all indices of this worker in an epoch, in order, int64."""
        return epoch_order(self._length, self._seed, epoch, self._shuffle)[self._slots]

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. An epoch that was loaded by :meth:`load_state_dict` keeps its position.

        Raises:
            ValueError: the epoch is negative.
        """
        epoch = check_epoch(epoch)
        self._take_back()
        if not (self._pending and epoch == self._epoch):
            self._epoch, self._position, self._pending, self._extra = epoch, 0, True, []

    def state_dict(self, position: int | None = None) -> State:
        """Return where the epoch stands: plain numbers, fit for JSON.

        Args:
            position: how many samples of the epoch were trained on. By default those of the batches that the loop has
                got, without those that a ``DataLoader`` has fetched ahead. Where a class of somebody else makes
                batches of the indices, all that were handed out count.

        Raises:
            ValueError: more samples than were handed out.
        """
        self._take_back()
        position = self._got() if position is None else position
        if not 0 <= position <= self._position:
            raise ValueError(f"position is {position}; {self._position} samples of epoch {self._epoch} were handed out")
        done = position == len(self) + len(self._extra)
        where = {"epoch": self._epoch + done, "position": 0 if done else min(position, len(self))}
        again = [] if done else self._extra[max(0, position - len(self)) :]
        return where | ({"again": again} if again else {}) | self._settings()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken: the next iteration hands out exactly the remaining samples.

        Raises:
            ValueError: it is the state of something else, or in mid-epoch the data, seed and part are others than then.
                The sampler is unchanged.
        """
        check_kind(state, "epoch", "position")
        epoch, position = state["epoch"], state["position"]
        if position:
            check_settings(state, self._settings())
        if epoch < 0 or not 0 <= position <= len(self):
            raise ValueError(f"the state names sample {position} of epoch {epoch}; this part has {len(self)} samples")
        self._epoch, self._position, self._pending = epoch, position, True
        self._extra = [int(index) for index in state.get("again", ())]

    def _begin(self) -> NDArray[np.int64]:
        self._take_back()
        if not self._pending:
            self._epoch, self._position, self._extra = self._epoch + 1, 0, []
        self._pending, self._begun, self._dealing = False, self._position, None
        self._follow_leavers()
        return self.indices(self._epoch)

    def _follow_leavers(self) -> None:
        """Train on samples of workers that leave, if all of the job's workers share this data, each with its part."""
        session = joined_session()
        if session is None or self._global_batch_size is None or self._span is not None:
            return
        if (self._num_parts, self._part_index) != (len(session.workers), session.rank) or self._num_parts == 1:
            return
        if self._left_over is None:
            bounds = [part_bounds(self._global_batch_size, self._num_parts, rank) for rank in range(self._num_parts)]
            widths = [stop - start for start, stop in bounds]
            self._log = DealingLog(session, self._name, self._settings())
            self._left_over = LeftOver(session, self._name, widths, self._indices_of, self._log, self._drop_last)
        self._left_over.begin(self._note_rows(session.round))
        session.notice.at_leave(self._name, self._give_back)

    def _note_rows(self, round: int) -> int:
        """Note the global batches of the epoch, of which this worker has its columns; returns their number."""
        assert self._global_batch_size is not None
        assert self._log is not None
        size, length = self._global_batch_size, self._length
        bounds = {rank: part_bounds(size, self._num_parts, rank) for rank in range(self._num_parts)}
        width = bounds[self._part_index][1] - bounds[self._part_index][0]
        row, rows = self._position // width, len(self) // width
        self._log.note(round + 1, self._epoch, row * size, size, bounds)
        if rows * size > length:  # the last one begins the order again
            last = rows - 1
            order = epoch_order(length, self._seed, self._epoch, self._shuffle)
            samples = [int(order[(last * size + column) % length]) for column in range(size)]
            self._log.note(round + 1 + last - row, self._epoch, last * size, size, bounds, samples)
        return rows - row

    def _indices_of(self, part: int, epoch: int) -> NDArray[np.int64]:
        assert self._global_batch_size is not None
        columns = part_bounds(self._global_batch_size, self._num_parts, part)
        slots = column_slots(self._length, self._global_batch_size, columns, drop_last=self._drop_last)
        return epoch_order(self._length, self._seed, epoch, self._shuffle)[slots]

    def _give_back(self) -> m.GiveBack:
        """Return how far this worker has come, which leaves when its loop asks for the next batch."""
        got = self._got()
        return m.GiveBack(self._name, self._epoch, min(got, len(self)), self._extra[max(0, got - len(self)) :])

    def _has_more(self) -> bool:
        """Tell whether there are samples of workers that are gone to train on, besides those handed out."""
        if self._position < len(self) + len(self._extra):
            return True
        more = [] if self._left_over is None else self._left_over.share(self._epoch)
        self._extra += more
        if self._dealing is not None:
            self._dealing.add(len(more))
        return bool(more)

    def _take_back(self) -> None:
        """Let an iteration that has only looked come again."""
        if not self._pending and self._dealing is not None and self._dealing.has_only_looked:
            self._position, self._pending = self._begun, True

    def _got(self) -> int:
        """Return how many samples of the epoch the loop has got, as far as that is known."""
        walk = None if self._pending or self._dealing is None else self._dealing.loaded
        return self._position if walk is None or walk.has_ended else self._begun + walk.samples

    def __getstate__(self) -> State:
        return self.__dict__ | {"_dealing": None, "_left_over": None, "_log": None}

    def _walk(self, batch_size: int, drop_last: bool) -> Iterator[torch.Tensor]:
        indices = torch.from_numpy(self._begin())
        start, size = self._position, len(self)
        stop = size - (size - start) % batch_size if drop_last else size
        with Dealing(self) as self._dealing:
            for first in range(start, stop, batch_size):
                last = min(first + batch_size, stop)
                self._dealing.deal(last - first)
                self._position = last if last < stop else size  # dropped samples count as handed out
                yield indices[first:last]
            while self._has_more():
                first = self._position - size
                last = min(first + batch_size, len(self._extra))
                if not (drop_last and last - first < batch_size):
                    self._dealing.deal(last - first)
                    self._position = size + last
                    yield torch.tensor(self._extra[first:last], dtype=torch.int64, device="cpu")
                self._position = size + last

    def _cut(self) -> Slots:
        if not self._even:
            return np.arange(*self._bounds(self._length), dtype=np.int64)
        if self._global_batch_size is None:
            return window_slots(self._length, self._num_parts, self._part_index, drop_last=self._drop_last)
        columns = self._bounds(self._global_batch_size)
        return column_slots(self._length, self._global_batch_size, columns, drop_last=self._drop_last)

    def _bounds(self, length: int) -> tuple[int, int]:
        if self._span is not None:
            return span_bounds(length, self._span)
        return part_bounds(length, self._num_parts, self._part_index)

    def _part(self) -> str:
        if self._span is not None:
            return f"span {self._span}"
        return f"part {self._part_index} of {self._num_parts}"

    def _settings(self) -> State:
        names = ("length", "num_parts", "part_index", "shuffle", "seed", "even", "drop_last", "global_batch_size")
        span = None if self._span is None else list(self._span)
        return {name: getattr(self, f"_{name}") for name in names} | {"span": span}

    def _check_arguments(self, has_part: bool) -> None:
        check_part(self._num_parts, self._part_index)
        if self._seed < 0:
            raise ValueError(f"seed is {self._seed}; it must be 0 or more")
        if self._global_batch_size is not None and (self._global_batch_size < 1 or not self._even):
            raise ValueError(f"global_batch_size={self._global_batch_size} must be at least 1, and needs even=True")
        if self._span is None:
            return
        check_span(self._span)
        if has_part:
            raise ValueError("give either span or num_parts and part_index, not both")
        if self._even and self._global_batch_size is None:
            raise ValueError(
                "spans get equally many batches only when batches are as unequal as spans: give global_batch_size, "
                "the batch of all workers together, or even=False if workers need not stay together"
            )
