"""What a sampler in lock step has dealt, for the log of the job: one word for global batches that follow each other.

Every worker says it, because any of them may die; the scheduler writes it down once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.wire import messages as m
from paceline.worker.session import Session


class DealingLog:
    """The words of one sampler.

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
