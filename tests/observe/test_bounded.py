"""What the detector keeps does not grow with rounds: the soak leaves its objects out, whose number depends on time."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest

from paceline.observe.account import COMPUTE, FIGURES, INTERVAL, RECEIVE, SERVER_PARTS, WAIT, WORKER_PARTS, Steps
from paceline.observe.detector import Detector
from paceline.observe.history import LONG
from tests.soak.census import census, grown, leave_out_what_is_there

WORKERS = 3


class Job:
    """Heartbeats of some workers and of a server, with a few rounds in each."""

    def __init__(self, detector: Detector, kind: str) -> None:
        self.detector, self.kind = detector, kind
        self.chance, self.round, self.is_changing = random.Random(kind), 0, True

    def beat(self) -> None:
        for rank in range(WORKERS):
            if self.kind == "workers that leave and come" and self.chance.random() < 0.02:
                self.detector.leave(rank)
            self.detector.note_worker(rank, f"node{rank}", self._windows(rank), self._figures(), self._group(rank))
        self.round += 3
        if self.kind != "each worker alone":
            self.detector.note_late([(self.chance.randrange(WORKERS), 3, 0.01)])
        parts = [0.0] * len(SERVER_PARTS)
        parts[RECEIVE] = 0.1
        self.detector.note_server(0, "node0", [parts], self._figures())

    def run(self, beats: int) -> None:
        """Send heartbeats; at the end all workers are in one group."""
        for turn in range(beats):
            self.is_changing = turn + 1 < beats
            self.beat()

    def _group(self, rank: int) -> int:
        if self.kind == "groups that change":
            return self.chance.randrange(WORKERS) if self.is_changing else 0
        return rank if self.kind == "each worker alone" else 0

    def _windows(self, rank: int) -> Iterator[Steps]:
        for number in range(3):
            parts = [0.0] * len(WORKER_PARTS)
            parts[COMPUTE], parts[WAIT] = 0.1 * self.chance.lognormvariate(0, 0.2), 0.01
            yield Steps(self.round + number, 1, 32.0, parts)

    def _figures(self) -> list[int]:
        figures = [0] * len(FIGURES)
        figures[INTERVAL] = 500_000
        return figures


@pytest.fixture
def _without_earlier_objects() -> Iterator[None]:
    """Leave out what other tests of this process have imported and made: there are hundreds of thousands of objects."""
    leave_out_what_is_there()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_without_earlier_objects")
@pytest.mark.parametrize(
    "kind", ["one group", "each worker alone", "groups that change", "workers that leave and come"]
)
def test_detector_keeps_as_much_after_many_rounds(kind: str) -> None:
    job = Job(Detector(), kind)
    job.run(2 * LONG)
    before = census(is_whole=True)
    job.run(5 * LONG)
    assert grown(before, census(is_whole=True), LONG) == {}
