"""The short form: every mode over every transport; and proofs that the soak sees what grows."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from paceline.testing import LocalJob
from tests.soak.__main__ import FRONTS, MODES, problems_of
from tests.soak.census import census, grown
from tests.soak.job import Outcome, SoakJob, Trial
from tests.soak.repetitions import counts, left_in
from tests.soak.samples import MIB, Sample, growth, sample, slope
from tests.soak.uses import memory_of_a_closed_store, work_and_repeat
from tests.soak.worker import CHUNK

#: Repetitions of each use. After 20, ``lists`` and ``settings`` stand as they did before; a slot more or less of
#: ``lists`` is no leak.
COUNTS = counts(20, {"settings": 20}) | {"lists": (100, 60)}

#: What the C library's allocator and the interpreter take and keep by chance, spread over the few steps that are taken
#: here: under 200 on an idle host, up to 1,100 on a busy one. Tables that grow are found by their lengths.
MOST_BYTES_PER_STEP = 3000.0


class Table:
    """Passes for one of paceline's own."""

    __module__ = "paceline.made_up"

    def __init__(self) -> None:
        self.rows: list[int] = []


def test_census_counts_tables_objects_and_globals():
    table = Table()
    before = census()
    table.rows.extend(range(500))
    kept = [threading.Event() for _ in range(200)]
    more = grown(before, census(), 100)
    assert more["Table.rows"] == 500
    assert more["objects threading.Event"] == len(kept)


def test_a_line_is_fitted_and_descriptors_and_threads_are_compared():
    assert slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == pytest.approx(2.0)
    samples = [Sample(60.0 * i, int((100 + 2 * i) * MIB), 10 + (i > 6), 5) for i in range(9)]
    found = growth(samples)
    assert found.mib_per_minute == pytest.approx(2.0)
    assert (found.descriptors, found.threads) == (1, 0)
    assert len(problems_of(Outcome(found, 0.0, {}, samples))) == 2


def test_a_sample_sees_memory_and_descriptors():
    before = sample(os.getpid(), 0.0)
    # Pages of its own: a bytearray may get some that this process has freed before.
    block, files = mmap.mmap(-1, int(16 * MIB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), os.pipe()
    block.write(bytes(int(16 * MIB)))
    after = sample(os.getpid(), 1.0)
    assert after.memory_bytes - before.memory_bytes >= len(block) * 0.9
    block.close()
    assert after.descriptors == before.descriptors + 2
    for one in files:
        os.close(one)


@dataclass(frozen=True)
class Short:
    """What the short form has found.

    Attributes:
        outcomes: of the steps, by process.
        left: by repetitions, by use and process.
    """

    outcomes: Mapping[str, Outcome]
    left: Mapping[tuple[str, str], Mapping[str, int]]


@pytest.fixture(scope="module")
def short() -> Short:
    """All ways to train, in all modes, then all that may be repeated, by one job: it starts once."""
    trial = Trial(MODES, FRONTS, ["shm", "tcp"], servers=1, warm_up=(CHUNK, 0), measured=(CHUNK, 0))
    left: dict[tuple[str, str], Mapping[str, int]] = {}

    def repeat(job: SoakJob) -> None:
        left.update({(use, who): what for use, by in left_in(job, COUNTS) for who, what in by.items() if what})

    outcomes = trial.run(work_and_repeat, COUNTS, then=repeat)
    return Short(outcomes, left)


def test_nothing_grows_with_steps(short: Short) -> None:
    """``nox -s soak`` takes 5,000 steps and more of each."""
    for name, one in short.outcomes.items():
        assert not one.grown, f"{name}: {one.grown}"
        per_step = one.bytes_per_step / len(MODES) / len(FRONTS)
        print(f"{name}: {per_step:+.0f} bytes per step")
        assert per_step < MOST_BYTES_PER_STEP, name
        assert not one.growth.descriptors, name
        assert not one.growth.threads, name


def test_repetitions_leave_nothing(short: Short) -> None:
    """``nox -s soak`` repeats everything 1,000 times."""
    assert short.left == {}


def test_memory_of_a_closed_store_is_free_at_once() -> None:
    with LocalJob(1, 1) as job:
        assert job.run(memory_of_a_closed_store) == [[False, False]]
