"""``paceline profile``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.hetero.files import parse_speeds
from tests.clusters import programs

SCRIPT = """
import time
import torch
import paceline

store = paceline.kvstore.create("{store}")
model = torch.nn.Linear(4, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
for _ in range(100_000):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.02 if store.rank else 0.1)
    optimizer.step()
"""


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
def test_speeds_of_all_workers_are_written_and_the_job_ends(tmp_path: Path, store: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(store=store))
    words = ["profile", "-n", "2", "-s", "1", "--speeds", "found", "--rounds", "8", "--", sys.executable, "train.py"]
    done = programs.run(["-m", "paceline", *words], cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr
    speeds = parse_speeds((tmp_path / "found").read_text())
    assert [name.rpartition(":")[2] for name in speeds] == ["0", "1"]
    slow, fast = speeds.values()
    assert slow >= 0.1
    assert 0.02 <= fast < 0.9 * slow, "the wait for the slow worker does not count"
    assert done.stdout.strip().endswith((tmp_path / "found").read_text().strip())


def test_script_that_ends_too_early_is_said_to(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(store="dist_sync").replace("100_000", "4"))
    (tmp_path / "speeds").write_text("from before")
    words = ["profile", "-n", "2", "-s", "1", "--", sys.executable, "train.py"]
    done = programs.run(["-m", "paceline", *words], cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert "was not written here" in done.stdout
    assert "the script ended before enough rounds were measured" in done.stdout
    assert (tmp_path / "speeds").read_text() == "from before"


def test_options_of_launch_are_taken_and_own_ones_are_not_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "-n", "2", "--rounds=5", "--speeds", "here", "--dry-run", "--", sys.executable, "-c", "pass"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "PACELINE_PROFILE_ROUNDS=5" in shown
    assert "/here" in shown
    assert "--rounds" not in shown


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "-n", "2", "--rounds", "0", "--", sys.executable]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_groups_that_measure_by_themselves_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "-n", "2", "--groups", "auto", "--", "sh"]) == 2
    assert "--groups auto measures by itself; leave it out here" in capsys.readouterr().err
