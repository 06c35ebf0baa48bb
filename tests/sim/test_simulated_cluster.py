"""Cluster files."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.hetero import Speed
from paceline.sim import SimulatedCluster, SimulatedWorker, read_cluster

FILE = """
[[workers]]
count = 2
batch_s = 0.2
batch = 16
fixed = 0.5
bandwidth = 1e8
[[workers]]
batch_s = 0.32
[noise]
jitter = 0.1
spike_probability = 0.05
spike_factor = 8.0
[servers]
count = 2
bandwidth = 1e9
latency_s = 0.001
merge_s = 0.002
update_s = 0.003
[model]
bytes = 4e6
"""


def test_file_is_read_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    fast = SimulatedWorker(Speed(0.1, 0.1 / 16), 1e8)
    assert read_cluster(path) == SimulatedCluster(
        (fast, fast, SimulatedWorker(Speed(0.0, 0.01))), 0.1, 0.05, 8.0, 2, 1e9, 0.001, 0.002, 0.003, 4e6
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[worker]]", "unknown table 'worker'; did you mean 'workers'"),
        ("[[workers]]\nbatch_s = 1\nspeed = 2", "unknown key of"),
        ("[[workers]]\ncount = 2", "needs batch_s"),
        ("[[workers]]\nbatch_s = 0", "time per step above 0"),
        ("[[workers]]\nbatch_s = 1\n[noise]\njiter = 0.1", "did you mean 'jitter'"),
        ("[[workers]]\nbatch_s = 1\n[noise]\njitter = 'big'", "must be a number"),
        ("[[workers]]\nbatch_s = 1\n[noise]\njitter = -1", "cannot be negative"),
        ("[[workers]]\nbatch_s = 1\n[servers]\ncount = 0", "at least one server"),
        ("[servers]\ncount = 1", "needs workers"),
        ("[[workers]]\nbatch_s = nan", "must be a number"),
        ("[[workers]]\nbatch_s = inf", "time per step above 0"),
        ("[[workers]]\nbatch_s = 1\ncount = 2.7", "must be an integer"),
        ("[[workers]]\nbatch_s = 1\ncount = inf", "must be an integer"),
        ("[[workers]]\nbatch_s = 1\ncount = true", "must be an integer"),
        ("[[workers]]\nbatch_s = 1\ncount = -3", "at least 1"),
        ("[[workers]]\nbatch_s = 1\ncount = 1_000_001", "more than 1,000,000 workers"),
        ("[[workers]]\nbatch_s = 1\nbatch = 0", "at least 1"),
        ("[[workers]]\nbatch_s = 1\nfixed = 2", "less than 1"),
        ("[[workers]]\nbatch_s = 1\nfixed = 1", "less than 1"),
        ("[[workers]]\nbatch_s = 1\nbandwidth = nan", "must be a number"),
        ("[[workers]]\nbatch_s = 1\n[noise]\njitter = nan", "must be a number"),
        ("[[workers]]\nbatch_s = 1\n[noise]\njitter = inf", "without end"),
        ("[[workers]]\nbatch_s = 1\n[noise]\nspike_probability = 5", "at most 1"),
        ("[[workers]]\nbatch_s = 1\n[noise]\nspike_probability = -1", "cannot be negative"),
        ("[[workers]]\nbatch_s = 1\n[noise]\nspike_factor = 0", "a factor above 0"),
        ("[[workers]]\nbatch_s = 1\n[servers]\ncount = 1.5", "must be an integer"),
        ("[[workers]]\nbatch_s = 1\n[servers]\nupdate_s = inf", "without end"),
        ("[[workers]]\nbatch_s = 1\n[model]\nbytes = nan", "must be a number"),
        ("workers = 3", "with two brackets"),
        ("[workers]\nbatch_s = 1", "with two brackets"),
        ("workers = [1, 2]", "is no table"),
        ("noise = 3\n[[workers]]\nbatch_s = 1", "is no table"),
        ("[[workers]]\nbatch_s = 1\n[[servers]]\ncount = 1", "is no table"),
        ("[[workers", "cannot be read"),
        pytest.param(f"workers = {5000 * '['}{5000 * ']'}", "cannot be read: maximum recursion depth", id="deep"),
    ],
)
def test_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_cluster(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        read_cluster(tmp_path / "none.toml")
