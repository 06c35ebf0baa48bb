"""The processors that a process may use, and the time of them that its control groups give it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.host import cores


def quota(folder: Path, own: str, limits: Mapping[str, str]) -> float:
    """Return the quota of a process whose control groups are ``own``, where files have these limits."""
    (folder / "own").write_text(own)
    for name, text in limits.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return cores.quota(folder / "own", folder)


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4.0),
        ("0::/elsewhere\n", {}, math.inf),
        ("0::/\n", {"cpu.max": "nonsense\n"}, math.inf),
        (
            "3:cpu,cpuacct:/a\n2:memory:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
        ("3:cpu:/a\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
    ],
)
def test_quota_of_control_groups(own: str, limits: Mapping[str, str], expected: float, tmp_path: Path) -> None:
    assert quota(tmp_path, own, limits) == expected


def test_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cores.quota(tmp_path / "none", tmp_path) == math.inf


def test_processors_are_those_whose_time_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "quota", lambda: math.inf)
    assert cores.usable_cores() == 8
    monkeypatch.setattr(cores, "quota", lambda: 2.5)
    assert cores.usable_cores() == 2
    monkeypatch.setattr(cores, "quota", lambda: 0.3)
    assert cores.usable_cores() == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(cores, "quota", lambda: math.inf)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.usable_cores() == 1
