"""Rules check themselves after every event in all processes of a test, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline
from paceline import kvstore
from paceline.consistency import CheckedRule, Policy, new_rule
from paceline.testing import LocalJob, WorkerFailedError

SOURCES = str(Path(paceline.__file__).parents[1])

#: Imported by a server for its optimizer: a rule counts more rounds as finished than its workers have pushed.
BROKEN = """
import torch
from paceline.consistency.rule import Rule

def apply(self, cohort):
    action = right(self, cohort)
    self.finished[action.workers[0]] += 5
    return action

right, Rule._apply = Rule._apply, apply

class SGD(torch.optim.SGD):
    pass
"""
CLASS = "from paceline.consistency import *; print(type(new_rule(Policy('all'), 1)).__name__)"


def push_once() -> list[float]:
    store = kvstore.create("dist_async")
    store.init("w", torch.zeros(3))
    store.set_optimizer("broken:SGD", lr=0.5)
    store.push("w", torch.ones(3))
    out = torch.zeros(3)
    store.pull("w", out)
    return out.tolist()


def test_rules_of_tests_check_themselves() -> None:
    assert type(new_rule(Policy("all"), 1)) is CheckedRule


def test_rules_of_a_program_do_not() -> None:
    env = os.environ | {"PYTHONPATH": SOURCES}
    text = subprocess.check_output([sys.executable, "-c", CLASS], text=True, env=env, timeout=60)
    assert text == "Rule\n"


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of a job whose servers import the rule that is broken."""
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    return {"allow": "broken:SGD"}


def test_job_with_a_broken_rule_fails_with_the_invariant_and_the_story(broken: dict[str, str]) -> None:
    with (
        LocalJob(**broken) as job,
        pytest.raises(WorkerFailedError, match="worker 0: finished a round that it has not pushed") as failure,
    ):
        job.run(push_once)
    assert "worker 0 pushed round 1 (1 samples, read version 0): cohort 0" in str(failure.value)


def test_job_that_does_not_check_goes_on_with_a_broken_rule(broken: dict[str, str]) -> None:
    with LocalJob(check_rules=False, **broken) as job:
        assert job.run(push_once) == [[-0.5] * 3]
