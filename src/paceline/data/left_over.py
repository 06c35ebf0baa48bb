"""Samples of an epoch that workers leave over who die, or leave under notice: the others train on them at its end.

The scheduler says which workers are gone at a point of the loop, the same to all that ask (``AskGone``). So nobody
waits for anybody, and all divide the same samples.

| a worker is gone, and has given back           | left over at the end of epoch e                                     |
|------------------------------------------------|---------------------------------------------------------------------|
| epoch e                                        | the rest of its part                                                |
| an earlier epoch                               | its part; and the rest of the earlier one, if others did not see it |
| a later epoch                                  | nothing                                                             |
| nothing: it died, or did not walk this sampler | its part, without a batch for each round that it has pushed         |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.data.dealing_log import DealingLog
from paceline.hetero.batch_shares import columns_of
from paceline.wire import messages as m
from paceline.worker.session import Session

Indices: TypeAlias = NDArray[np.int64]


class LeftOver:
    """The left-over samples of one sampler.

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
