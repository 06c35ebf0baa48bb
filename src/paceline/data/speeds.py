"""What the workers of a job know of each other's speeds, alike on all of them.

A worker's speed travels as a note with the first push of a step, and the notes of all workers come back with its
answer: no message is added, and nobody waits. All workers behind an update get the same notes, so what follows from
them is the same on all, between the same two rounds. Where a step has no push, or a worker is missing in the notes, the
workers gather instead: a gather also says who is gone.

| the step that ends                                               | the workers            |
|------------------------------------------------------------------|------------------------|
| nothing is due                                                   | exchange nothing       |
| is the first or the last one of an epoch                         | gather                 |
| was pushed, and the answer has notes of this step from everybody | use the notes          |
| was not pushed, or the answer lacks somebody                     | gather                 |
"""

from __future__ import annotations

import struct
from collections.abc import Collection

from paceline.hetero import Speed, SpeedMeter
from paceline.kvstore.dist import DistStore
from paceline.worker.session import Session

#: Number of the step, fixed seconds, seconds per sample (0: not known yet), and the largest batch that fits into
#: memory (0: no limit).
_NOTE = struct.Struct("<qddq")

#: Speeds are exchanged in each of the first steps, then in every second one: so a change of speed, which three steps
#: show, is followed in six.
_FIRST_EXCHANGES, _INTERVAL = 5, 2

#: Steps between two exchanges, at most.
MOST_STEPS = _INTERVAL


class Speeds:
    """Measures this worker, and exchanges that with the others.

    Args:
        store: of the job, in lock step; None: nothing is exchanged.
        rank: of this worker.
        num_workers: of the job.
        max_batch: samples that fit into this worker's memory at once.

    Attributes:
        caps: ``max_batch`` of each worker, as far as it is known.
    """

    def __init__(self, store: DistStore | None, rank: int, num_workers: int, max_batch: int | None) -> None:
        self._store, self._rank = store, rank
        self._meter = SpeedMeter()
        self._known: dict[int, Speed] = {}
        self.caps: list[int | None] = [None] * num_workers
        self.caps[rank] = max_batch
        self._steps = self._measured = 0

    @property
    def known(self) -> dict[int, Speed]:
        """The speeds of the last exchange, the same on all workers; before the first one, this worker's own."""
        own = self._meter.speed()
        return dict(self._known) if own is None else {self._rank: own} | self._known

    @property
    def told(self) -> dict[int, Speed]:
        """The speeds of the last exchange, the same on all workers."""
        return self._known

    def measure(self, samples: int, passes: int, seconds: float) -> None:
        """Note a step: its samples, the parts in which they were computed, and the time that they took."""
        self._measured += 1
        if seconds > 0 and self._measured > 1:  # the first step loads libraries and makes memory
            self._meter.add(samples / passes, seconds / passes)

    def begin_step(self) -> None:
        """Let the first push of the step that begins carry this worker's speed, if that is due at its end."""
        self._steps += 1
        if self._store is not None and self._is_due:
            self._store.traffic.tell(self._note())

    def end_step(self, workers: Collection[int], is_last: bool) -> Collection[int] | None:
        """Exchange speeds, if that is due. All workers do this at the same steps.

        Args:
            workers: those that are there, as far as it is known.
            is_last: of an epoch; a gather then shows who is gone.

        Returns:
            The workers that are gone; None: nothing was exchanged.
        """
        if self._store is None or not (self._is_due or is_last):
            return None
        notes = self._store.traffic.heard()
        if is_last or not self._are_whole(notes, workers):
            return self.gather()
        self._take(notes)
        return ()

    def gather(self) -> Collection[int] | None:
        """Exchange speeds by a message of every worker; returns as :meth:`end_step` does. Collective."""
        if self._store is None:
            return None
        said = dict(enumerate(self._session.gather("paceline/speeds", self._note())))
        self._take({worker: note for worker, note in said.items() if note})
        return [worker for worker, note in said.items() if not note]

    def forget(self, worker: int) -> None:
        """Forget a worker that is gone."""
        self._known.pop(worker, None)

    @property
    def _session(self) -> Session:
        assert self._store is not None
        return self._store.session

    @property
    def _is_due(self) -> bool:
        return self._steps <= _FIRST_EXCHANGES or self._steps % _INTERVAL == 0

    def _note(self) -> bytes:
        own = self._meter.speed() or Speed(0.0, 0.0)
        return _NOTE.pack(self._steps, own.fixed_s, own.per_sample_s, self.caps[self._rank] or 0)

    def _are_whole(self, notes: dict[int, bytes], workers: Collection[int]) -> bool:
        steps = {_NOTE.unpack(note)[0] for note in notes.values()}
        return len(steps) == 1 and notes.keys() >= set(workers)

    def _take(self, notes: dict[int, bytes]) -> None:
        for worker, note in notes.items():
            _, fixed_s, per_sample_s, cap = _NOTE.unpack(note)
            self.caps[worker] = cap or None
            if per_sample_s > 0:
                self._known[worker] = Speed(fixed_s, per_sample_s)
