"""``paceline launch --groups auto``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.auto_groups import ROUNDS, with_measured_groups
from paceline.errors import LaunchError
from paceline.launch import JobSpec

SPEC = JobSpec(("python", "train.py"), 3, settings={"staleness": "2"}, max_restarts=4)


def test_job_gets_the_groups_of_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[JobSpec] = []

    def run(spec: JobSpec) -> int:
        ran.append(spec)
        Path(spec.settings["profile"]).write_text("h:0 0.3\nh:1 0.1\nh:2 0.31\n")
        return 0

    found = with_measured_groups(SPEC, run)
    assert isinstance(found, JobSpec)
    assert found.settings == {"staleness": "2", "groups": "1; 0 2;"}
    assert found.max_restarts == 4
    assert ran[0].settings.keys() == {"staleness", "groups", "profile", "profile_rounds"}
    assert (ran[0].settings["groups"], ran[0].settings["profile_rounds"]) == ("auto", str(ROUNDS))
    assert ran[0].max_restarts == 0
    assert "h:1  # 0.1 s per step" in capsys.readouterr().out


def test_measurement_that_fails_ends_it_with_its_exit_code() -> None:
    assert with_measured_groups(SPEC, lambda spec: 9) == 9
    with pytest.raises(LaunchError, match="no speeds were measured"):
        with_measured_groups(SPEC, lambda spec: 0)


SCRIPT = """
import time
import torch
import paceline

store = paceline.kvstore.create("dist_gsync")
model = torch.nn.Linear(4, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
for _ in range(60 if store.session.settings.profile else 3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.01 if store.rank == 1 else 0.1)
    optimizer.step()
print("trained in groups", store.policy.groups)
"""


def test_workers_are_measured_before_the_job_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["launch", "-n", "2", "-s", "1", "--groups", "auto", "--", sys.executable, "train.py"]
    command = [sys.executable, "-m", "paceline", *words]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained in groups") == 2
    groups = done.stdout.rpartition("trained in groups ")[2].strip()
    assert groups == "((1,), (0,))"
