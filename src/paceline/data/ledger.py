"""The ledger of an epoch: the order of its samples, those dealt, those that come once more, and its state.

| who deals | of samples that were dealt, and not trained on | state |
|---|---|---|
| equal parts, without a message | :class:`LeftOver`: asks the scheduler who is gone | the position in the part |
| shares of global batches | :class:`HandedOut`: workers tell each other who is gone | the index of the next sample |
| a pool | :class:`paceline.hetero.sample_pool.Pool`, in the scheduler | the positions that are left |

Shares and pools can go on from a state of the other: :func:`left_of`, :func:`place_of`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.hetero.batch_shares import columns_of
from paceline.hetero.sample_pool import positions
from paceline.layout.ranges import Ranges, everything, joined
from paceline.naming import listed
from paceline.wire import messages as m
from paceline.worker.session import Session

Indices: TypeAlias = NDArray[np.int64]
State = dict[str, Any]


def epoch_order(length: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the order of ``length`` samples in an epoch, int64; without ``shuffle`` they stay as they are.

    It sorts raw PCG64 output, whose stream NumPy guarantees for ever; ``Generator.permutation`` may change with the
    version, and machines that are not alike seldom run the same one.
    """
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.asarray(bits.random_raw(length)).argsort(kind="stable")


def check_kind(state: Mapping[str, Any], *names: str) -> None:
    """Refuse a state of another kind of sampler.

    Raises:
        ValueError: names the missing entries.
    """
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(
            f"this is no state of such a sampler: it has no {listed(missing)}, but {listed(state) or 'nothing'}; load "
            "what state_dict() of the same kind of sampler has returned"
        )


def check_settings(state: Mapping[str, Any], settings: State) -> None:
    """Refuse a state of the middle of an epoch that a sampler with these settings cannot go on with.

    Raises:
        ValueError: names the settings that differ.
    """
    then = {name: state.get(name) for name, value in settings.items() if state.get(name) != value}
    if then:
        now = {name: settings[name] for name in then}
        raise ValueError(
            f"the state was taken in the middle of epoch {state['epoch']} with {then}, this sampler has {now}"
        )


# ---- dealt -----------------------------------------------------------------------------------------------------------


class DealingLog:
    """What a sampler in lock step has dealt, for the log of the job: a word for global batches that follow each other.

    Every worker says it, because any of them may die; the scheduler writes it down once.

    Args:
        session: this worker's connection to the job.
        sampler: its name, the same on all workers.
        settings: ``length``, ``seed`` and ``shuffle``: the order of an epoch follows from them.
    """

    def __init__(self, session: Session, sampler: str, settings: Mapping[str, Any]) -> None:
        self._session, self._sampler, self._settings = session, sampler, settings
        self._last: m.Dealt | None = None

    def note(
        self, round: int, epoch: int, first: int, stride: int, columns: Mapping[int, tuple[int, int]],
        samples: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Note a global batch; ``samples`` are its samples, if they do not follow from the epoch's order."""
        settings, last = self._settings, self._last
        made = m.Dealt(
            self._sampler, round, epoch, settings["length"], settings["seed"], settings["shuffle"], first, stride,
            [(worker, *part) for worker, part in columns.items()], list(samples),
        )  # fmt: skip
        if last is None or not _follows(made, last):
            self._last = made
            self._session.to_tell.dealt(made)


def _follows(one: m.Dealt, last: m.Dealt) -> bool:
    """Tell whether a global batch is the one that follows from the last word."""
    rounds = one.round - last.round
    return (
        not (one.samples or last.samples)
        and rounds >= 0
        and (one.epoch, one.stride, one.columns) == (last.epoch, last.stride, last.columns)
        and one.first == last.first + rounds * last.stride
    )


@dataclass(frozen=True)
class GlobalBatch:
    """A global batch of an epoch."""

    round: int
    """Round of its push."""
    first: int
    """Index of its first sample."""
    length: int
    """Samples of the epoch, as far as they were known: columns beyond begin the order again."""
    columns: dict[int, tuple[int, int]]
    """By worker, start and stop of its part; of what it has done of it, once that is known."""


class HandedOut:
    """The last global batches of an epoch, and the positions that come once more.

    The *position* of a sample is its place in the order of the epoch. Its *index* counts from the first sample of the
    epoch to the last one, repetitions included: these have indices from the length of the data on.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._batches: deque[GlobalBatch] = deque()
        """As many as may not be trained on yet."""
        self.again: list[int] = []
        """Positions that come once more, because their worker is gone or ran out of time."""

    @property
    def length(self) -> int:
        """Samples of the epoch, as far as they are known now."""
        return self._length + len(self.again)

    @property
    def last_round(self) -> int:
        """The round of the last global batch."""
        return self._batches[-1].round if self._batches else 0

    def position(self, index: int) -> int:
        """Return the position of an index."""
        return index if index < self._length else self.again[index - self._length]

    def begin(self, remembered: int) -> None:
        """Forget the global batches of the last epoch, and remember so many from here on."""
        self._batches = deque(maxlen=remembered)

    def rest(self, first: int) -> list[int]:
        """Return the positions from an index on."""
        return [self.position(index) for index in range(first, self.length)]

    def add(self, batch: GlobalBatch) -> None:
        """Note a global batch."""
        self._batches.append(batch)

    def first_of_last(self, count: int) -> int | None:
        """Return the first index of the last ``count`` global batches; None if there are not so many."""
        return self._batches[-count].first if 0 < count <= len(self._batches) else None

    def missing(self, worker: int, last: int, stop: int) -> list[int]:
        """Return the positions that a worker has not trained on that is gone since a round; ``stop`` is an index."""
        batches = [one for one in self._batches if one.round > last and one.first < stop and worker in one.columns]
        return [position for one in batches for position in self._positions(one, *one.columns[worker])]

    def cut_short(self, worker: int, done: int) -> None:
        """Let the rest of a worker's part of the last global batch come once more."""
        one = self._batches[-1]
        if worker in one.columns:
            start, stop = one.columns[worker]
            one.columns[worker] = start, start + done
            self.again += self._positions(one, start + done, stop)

    def _positions(self, one: GlobalBatch, start: int, stop: int) -> list[int]:
        return [self.position(one.first + i) for i in range(start, stop) if one.first + i < one.length]


class LeftOver:
    """Samples that workers leave over who die, or leave under notice: the others train on them at the epoch's end.

    The scheduler says which workers are gone at a point of the loop, the same to all that ask (``AskGone``). So nobody
    waits for anybody, and all divide the same samples.

    | a worker is gone, and has given back           | left over at the end of epoch e                                 |
    |------------------------------------------------|-----------------------------------------------------------------|
    | epoch e                                        | the rest of its part                                            |
    | an earlier epoch                               | its part; and the rest of that one, if others did not see it    |
    | a later epoch                                  | nothing                                                         |
    | nothing: it died, or did not walk this sampler | its part, without a batch for each round that it has pushed     |

    Args:
        session: this worker's connection to the job.
        name: name of the sampler, the same on all workers.
        widths: by worker, the samples of a batch.
        part: returns a worker's samples of an epoch, in order.
        log: takes the global batches of left-over samples.
        drop_last: leave out a last global batch that is not whole.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        widths: Sequence[int],
        part: Callable[[int, int], Indices],
        log: DealingLog,
        drop_last: bool = False,
    ) -> None:
        self._session, self.name, self._widths, self._part, self._drop_last = session, name, widths, part, drop_last
        self._log = log
        self._points = self._begun = self._round = 0
        self._known: set[int] = set()
        """Workers whose last epoch was divided."""
        self._divided: set[int] = set()
        """Workers whose samples of this epoch were divided."""

    def begin(self, rows: int) -> None:
        """Note that an epoch begins, with so many global batches before the left-over samples."""
        self._points, self._begun, self._divided = 0, self._session.round, set()
        self._round = self._begun + rows

    def share(self, epoch: int) -> list[int]:
        """Return this worker's share of the samples that were left over since the last call; nothing: none were."""
        if self._session.failure is not None or self._session.has_left:
            return []
        point = f"{self.name}/{epoch}/{self._points}"
        self._points += 1
        answer = self._session.call_scheduler(m.AskGone(point, self.name), "workers that are gone")
        assert isinstance(answer, m.Gone)
        samples: list[int] = []
        for one in answer.workers:
            if one.rank not in self._divided:
                samples += self._left_by(one, epoch)
        self._divided.update(one.rank for one in answer.workers)
        return self._own_share(samples, {one.rank for one in answer.workers}, epoch)

    def _left_by(self, one: m.GoneWorker, epoch: int) -> list[int]:
        is_new, given = one.rank not in self._known, one.given
        if given is not None and given.epoch > epoch:
            return []
        self._known.add(one.rank)
        part = self._part(one.rank, epoch)
        if given is None:
            done = max(0, one.round - self._begun) * self._widths[one.rank] if is_new else 0
            return [int(index) for index in part[done:]]
        found = [int(index) for index in part] if given.epoch < epoch else []
        if is_new:
            found += [int(index) for index in self._part(one.rank, given.epoch)[given.done :]]
            found += given.again
        return found

    def _own_share(self, samples: Sequence[int], gone: set[int], epoch: int) -> list[int]:
        widths = {rank: width for rank, width in enumerate(self._widths) if rank not in gone}
        row, mine = sum(widths.values()), list[int]()
        for first in range(0, len(samples), row):
            left = len(samples) - first
            if self._drop_last and left < row:
                break
            columns = columns_of(widths, left)
            most = max(stop for _, stop in columns.values())
            batch = [samples[(first + column) % len(samples)] for column in range(most)]
            self._round += 1
            self._log.note(self._round, epoch, 0, row, columns, batch)
            start, stop = columns[self._session.rank]
            mine += batch[start:stop]
        return mine


# ---- states ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharePosition:
    """Where shares go on."""

    epoch: int
    row: int
    """Global batches that were handed out."""
    first: int
    """Index of the first sample that is left."""
    again: list[int]
    shares: list[int]


def left_of(state: Mapping[str, Any], settings: State) -> tuple[int, Ranges]:
    """Return the epoch of a state, and the positions that it leaves; none: all.

    Args:
        state: state of a pool or of shares.
        settings: settings of the sampler that goes on: the order of an epoch follows from them.

    Raises:
        ValueError: it was taken in mid-epoch of other data or another order, or it makes no sense.
    """
    check_kind(state, "epoch", "length")
    epoch, length = int(state["epoch"]), int(state["length"])
    if "left" in state:
        left: Ranges = tuple((int(start), int(stop)) for start, stop in state["left"])
    else:
        place = place_of(state, settings)
        again = place.again[max(0, place.first - length) :]
        left = joined([(place.first, length), *((position, position + 1) for position in again)])
    if epoch < 0 or not left or joined(left) != left or left[0][0] < 0 or left[-1][1] > length:
        raise ValueError(f"the state names positions {list(left)} of epoch {epoch} of {length} samples")
    if left == everything(length):
        return epoch, ()
    check_settings(state, settings)
    return epoch, left


def place_of(state: Mapping[str, Any], settings: State) -> SharePosition:
    """Return where shares go on.

    Args:
        state: state of shares or of a pool.
        settings: settings of the sampler that goes on; in mid-epoch those of the state must be the same.
    """
    if "left" in state:
        epoch, left = left_of(state, settings)
        return (
            SharePosition(epoch, 1, state["length"], positions(left), [])
            if left
            else SharePosition(epoch, 0, 0, [], [])
        )
    check_kind(state, "epoch", "length", "batch", "global_batch_size", "shares")
    again, size, length = [int(one) for one in state.get("again", ())], state["global_batch_size"], state["length"]
    if state["batch"] or again:
        check_settings(state, settings)
    if not all(0 <= one < length for one in again):
        raise ValueError(f"the state names samples beyond the {length} of the data")
    rows = -(-(length + len(again)) // size)
    if state["epoch"] < 0 or not 0 <= state["batch"] <= (state.get("first", 0) or rows):
        raise ValueError(f"the state names batch {state['batch']}; an epoch has {rows}")
    first = min(state.get("first", state["batch"] * size), length + len(again))
    return SharePosition(state["epoch"], state["batch"], first, again, state["shares"])
