"""``paceline launch --groups auto``."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.cli.auto_groups import ROUNDS, with_measured_groups
from paceline.errors import ConfigError, LaunchError
from paceline.launch import JobSpec
from paceline.testing import LocalJob

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


def groups_of_a_store():
    try:
        return paceline.kvstore.create("dist_gsync").policy.groups
    except ConfigError as error:
        return str(error)


def test_workers_are_one_group_while_they_are_measured(tmp_path: Path) -> None:
    with LocalJob(num_workers=2, num_servers=1, groups="auto", profile=str(tmp_path / "speeds")) as job:
        assert job.run(groups_of_a_store) == [[[0, 1]]] * 2
    with LocalJob(num_workers=1, num_servers=1, groups="auto") as job:
        assert "start the job with --groups auto" in job.run(groups_of_a_store)[0]
