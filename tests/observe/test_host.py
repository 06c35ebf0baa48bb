"""Figures of the kernel about this process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.observe.account import BUSY, FIGURES, INTERVAL, REREAD, THROTTLED
from paceline.observe.host import HeldUp, HostFigures, stop_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def figures(cgroups: Path, clock: Clock) -> HostFigures:
    return HostFigures(threading.get_native_id(), cgroups, clock)


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("cpu.stat", "usage_usec 9\nnr_throttled 1\nthrottled_usec 500\n", "nr_throttled 9\nthrottled_usec 200500\n"),
        ("cpu/cpu.stat", "nr_throttled 1\nthrottled_time 500000\n", "nr_throttled 9\nthrottled_time 200500000\n"),
    ],
)
def test_quota_is_read_from_both_versions_of_cgroups(tmp_path: Path, file: str, before: str, after: str) -> None:
    clock = Clock()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(before)
    host = figures(tmp_path, clock)
    (tmp_path / file).write_text(after)
    clock.now += 0.5
    found = host.read()
    assert (found[INTERVAL], found[THROTTLED]) == (500_000, 200_000)
    clock.now += 0.5
    assert host.read()[THROTTLED] == 0


@pytest.mark.parametrize("folder", [".", "memory"])
def test_pages_that_are_read_again_are_counted_by_both_versions_of_cgroups(tmp_path: Path, folder: str) -> None:
    stat = "anon 1\nworkingset_refault_anon {}\nworkingset_refault_file {}\ntotal_workingset_refault_file 99999\n"
    file = tmp_path / folder / "memory.stat"
    file.parent.mkdir(exist_ok=True)
    file.write_text(stat.format(7, 100))
    host = figures(tmp_path, Clock())
    file.write_text(stat.format(10, 4100))
    assert host.read()[REREAD] == 4003
    assert host.read()[REREAD] == 0


def held_up(ran: float = 0.0, queued: float = 0.0, others: float = 0.0) -> HeldUp:
    """Return what has held up two threads of a process, the second one nothing."""
    return {"1": round(1e9 * ran), "2": 0}, {"1": round(1e9 * queued), "2": 0}, others


def test_late_wake_up_that_nothing_explains_is_a_stop() -> None:
    assert stop_of(1.0, held_up(7.0, 7.0, 7.0), held_up(7.2, 7.0, 7.0)) == 1.0
    assert stop_of(1.0, held_up(), held_up(queued=0.4)) == pytest.approx(0.6)
    assert stop_of(0.1, held_up(), held_up()) == 0.0


@pytest.mark.parametrize("reason", [{"ran": 1.2}, {"queued": 0.9}, {"others": 0.9}, {"queued": 0.4, "others": 0.4}])
def test_process_that_is_short_of_something_is_not_stopped(reason: dict[str, float]) -> None:
    assert stop_of(1.0, held_up(), held_up(**reason)) == 0.0


def test_no_stop_is_told_where_the_kernel_has_no_figures_of_threads() -> None:
    assert stop_of(1.0, ({}, {}, 0.0), ({}, {}, 0.0)) == 0.0


STOPPED_PROCESS = """
import sys
from paceline.observe.host import Stops
stops = Stops([])
stops.start()
for line in sys.stdin:
    print(stops.seconds, flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel has no schedstat")
def test_stop_of_a_real_process_is_seen() -> None:
    """A machine that is busy hides a stop now and then: it comes again."""
    argv = [sys.executable, "-c", STOPPED_PROCESS]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(60):
            process.stdin.write("?\n")
            seconds = float(process.stdout.readline())
            if seconds:
                break
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.7)
            process.send_signal(signal.SIGCONT)
        process.stdin.close()
    assert 0.3 <= seconds < 60


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel has no schedstat")
def test_computation_is_busy(tmp_path: Path) -> None:
    host = HostFigures(threading.get_native_id(), tmp_path)
    begun = time.thread_time()
    while time.thread_time() < begun + 0.05:
        pass
    assert host.read()[BUSY] >= 40_000


def test_host_without_any_figure_gives_zeros(tmp_path: Path) -> None:
    host = HostFigures(2**22 + 5, tmp_path)  # no thread has such an id
    found = host.read()
    assert len(found) == len(FIGURES)
    assert found[BUSY] == found[THROTTLED] == 0
