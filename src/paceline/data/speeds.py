"""The workers' knowledge of each other's speeds and of their last steps, alike on all of them.

A worker's speed, and how many samples of its part it has done by a deadline, travel as a note with the first push of a
step, and the notes of all workers come back with its answer, without further messages or waits. All workers behind an
update get the same notes, so their conclusions are the same, between the same two rounds. Where a step has no push, or
a worker is missing in the notes, the workers gather instead: a gather also says which workers are gone. With a
deadline an exchange is due in every step.

| the step that ends                                               | the workers            |
|------------------------------------------------------------------|------------------------|
| has no exchange due                                              | exchange nothing       |
| is the first or the last one of an epoch                         | gather                 |
| was pushed, and the answer has notes of this step from everybody | use the notes          |
| was not pushed, or the answer lacks somebody                     | gather                 |
| has a note that knows of a process which waits to join           | gather                 |

In a gather the job lets such a process in: all workers are between the same two rounds there.
"""

from __future__ import annotations

import struct
from collections.abc import Collection

from paceline.data.ledger import State
from paceline.hetero import Speed, SpeedMeter
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore

#: Number of the step, fixed seconds, seconds per sample (0: not known yet), the largest batch that fits into memory (0:
#: no limit), the samples of the step that are done (-1: all), and whether a process waits to join.
_NOTE = struct.Struct("<qddqq?")

#: Speeds are exchanged in each of the first steps, then in every second one: so a change of speed, which three steps
#: show, is followed in six.
_FIRST_EXCHANGES, _INTERVAL = 5, 2

#: Name of the exchange by messages: an error shows it.
_GATHER = "speeds, for which all workers begin and end their iterations over SharedBatchSampler together"

#: Steps between two exchanges, at most.
MOST_STEPS = _INTERVAL


class Speeds:
    """Measures this worker, and exchanges that with the others.

    Args:
        store: the job's store, in lock step; None: there is no exchange.
        is_always_due: speeds are exchanged in every step.

    Attributes:
        caps: ``max_batch`` of each worker, as far as it is known.
    """

    def __init__(
        self, store: DistStore | None, rank: int, num_workers: int, max_batch: int | None, is_always_due: bool = False
    ) -> None:
        self._store, self._rank, self._is_always_due = store, rank, is_always_due
        self._meter = SpeedMeter()
        self.told: dict[int, Speed] = {}
        """The speeds of the last exchange, the same on all workers."""
        self.caps: list[int | None] = [None] * num_workers
        self.caps[rank] = max_batch
        self.present: frozenset[int] = frozenset()
        """Workers of the last gather."""
        self.why_shut = ""
        """Why a process that waits cannot join here; empty: it can."""
        self._steps = self._measured = 0
        self._own_done: int | None = None
        self._done: dict[int, int | None] = {}
        """Samples of the step that each worker has done, as far as it is known; None: that was asked for."""

    @property
    def known(self) -> dict[int, Speed]:
        """The speeds of the last exchange, the same on all workers; before the first one, this worker's own."""
        own = self._meter.speed()
        return dict(self.told) if own is None else {self._rank: own} | self.told

    def measure(self, samples: int, passes: int, seconds: float) -> None:
        """Note a step: its samples, the parts in which they were computed, and the time that they took."""
        self._measured += 1
        if seconds > 0 and self._measured > 1:  # the first step loads libraries and makes memory
            self._meter.add(samples / passes, seconds / passes)

    def begin_step(self) -> None:
        """Let the first push of the step that begins carry this worker's speed, if that is due at its end."""
        self._steps += 1
        self._own_done, self._done = None, {}
        if self._store is not None and self._is_due:
            self._store.traffic.tell(self._note())

    def note_done(self, samples: int) -> None:
        """Let the first push of this step, which comes after this, say how many samples this worker has done."""
        self._own_done = samples
        if self._store is None:
            self._done[self._rank] = samples
        else:
            self._store.traffic.tell(self._note())

    def done(self) -> dict[int, int]:
        """Return how many samples of the step the workers have done that said so; each worker once.

        They are the same for all workers after the answer to the push of the step, for which this waits, and after
        :meth:`end_step`.
        """
        if self._store is not None and self._own_done is not None:
            self._take_done(self._store.traffic.heard())
        said = {worker: samples for worker, samples in sorted(self._done.items()) if samples is not None}
        self._done = dict.fromkeys(self._done)
        return said

    def end_step(self, workers: Collection[int], is_last: bool) -> Collection[int] | None:
        """Exchange speeds, if that is due. All workers do this at the same steps.

        Args:
            workers: those that are there, as far as it is known.
            is_last: the step is the last one of an epoch; a gather then shows the workers that are gone.

        Returns:
            The workers that are gone; None: there was no exchange.
        """
        if self._store is None or not (self._is_due or is_last):
            return None
        notes = self._store.traffic.heard()
        self._take_done(notes)  # also those of workers that are gone since
        if is_last or not self._are_whole(notes, workers):
            return self.gather()
        self._take(notes)
        return ()

    def gather(self) -> Collection[int] | None:
        """Exchange speeds by a message of every worker; returns as :meth:`end_step` does. Collective."""
        if self._store is None:
            return None
        said = dict(enumerate(self._store.session.gather(_GATHER, self._note(), lets_in=True, why_shut=self.why_shut)))
        notes = {worker: note for worker, note in said.items() if note}
        self.present = frozenset(notes)
        self._take_done(notes)
        self._take(notes)
        return [worker for worker, note in said.items() if not note]

    def forget(self, worker: int) -> None:
        """Forget a worker that is gone."""
        self.told.pop(worker, None)

    def state(self) -> State:
        """Return the knowledge that all workers have alike, for :meth:`stand` of one that joins."""
        told = [[worker, one.fixed_s, one.per_sample_s] for worker, one in self.told.items()]
        return {"told": told, "caps": [cap or 0 for cap in self.caps], "steps": self._steps}

    def stand(self, state: State) -> None:
        """Know what the others know, as :meth:`state` of one of them says."""
        own = self.caps[self._rank]
        self.told = {worker: Speed(fixed_s, per_sample_s) for worker, fixed_s, per_sample_s in state["told"]}
        self.caps[:] = [cap or None for cap in state["caps"]]
        self.caps[self._rank], self._steps = own, state["steps"]

    @property
    def are_exchanged(self) -> bool:
        """Whether workers exchange speeds, and let others join there."""
        return self._store is not None

    @property
    def _is_due(self) -> bool:
        return self._is_always_due or self._steps <= _FIRST_EXCHANGES or self._steps % _INTERVAL == 0

    def _note(self) -> bytes:
        own = self._meter.speed() or Speed(0.0, 0.0)
        done = -1 if self._own_done is None else self._own_done
        is_awaited = self._store is not None and self._store.session.has_joiners
        return _NOTE.pack(self._steps, own.fixed_s, own.per_sample_s, self.caps[self._rank] or 0, done, is_awaited)

    def _are_whole(self, notes: dict[int, bytes], workers: Collection[int]) -> bool:
        said = [_NOTE.unpack(note) for note in notes.values()]
        is_shut = not any(is_awaited for *_, is_awaited in said)
        return is_shut and len({step for step, *_ in said}) == 1 and notes.keys() >= set(workers)

    def _take(self, notes: dict[int, bytes]) -> None:
        for worker, note in notes.items():
            _, fixed_s, per_sample_s, cap, *_ = _NOTE.unpack(note)
            self.caps[worker] = cap or None
            if per_sample_s > 0:
                self.told[worker] = Speed(fixed_s, per_sample_s)

    def _take_done(self, notes: dict[int, bytes]) -> None:
        for worker, note in notes.items():
            step, *_, done, _ = _NOTE.unpack(note)
            if step == self._steps and done >= 0:
                self._done.setdefault(worker, done)


def lock_step_of(store: KVStoreBase, measures: bool, deadline_s: float | None) -> DistStore | None:
    """Return the store whose workers agree on shares; None: there is one worker."""
    if not isinstance(store, DistStore):
        return None
    if (measures or deadline_s is not None) and store.policy.merge != "all":
        what, instead = ("shares='measured'", "Give fractions") if measures else ("deadline_s", "Take a pool")
        raise ValueError(
            f"{what} needs dist_sync: the workers of a {store.type} store go on at their own speed, and "
            f"would have to wait for each other to agree. {instead} instead"
        )
    return store
