"""Figures of the kernel about this process."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from paceline.observe.account import BUSY, FIGURES, INTERVAL, STOPPED, THROTTLED
from paceline.observe.host import HostFigures


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


def test_process_that_did_not_run_for_a_while_was_stopped(tmp_path: Path) -> None:
    clock = Clock()
    host = figures(tmp_path, clock)
    stopped = []
    for interval in (0.5, 0.5, 1.6, 0.7):
        clock.now += interval
        stopped.append(host.read()[STOPPED])
    assert stopped == [0, 0, pytest.approx(1_100_000, rel=0.2), 0]


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
