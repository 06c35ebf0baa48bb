"""``paceline launch --groups auto``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch

import paceline
from paceline.cli import auto_groups, main
from paceline.cli.auto_groups import ROUNDS, with_measured_groups
from paceline.consistency import Policy
from paceline.errors import ConfigError, LaunchError
from paceline.hetero import Choice, WorkerRound
from paceline.hetero.files import choice_text, parse_choice, parse_measured, parse_speeds, steps_line, steps_text
from paceline.launch import JobSpec
from paceline.testing import LocalJob

SPEC = JobSpec(("python", "train.py"), 3, settings={"staleness": "2"}, max_restarts=4)


def test_job_gets_the_groups_of_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[JobSpec] = []

    def run(spec: JobSpec) -> int:
        ran.append(spec)
        Path(spec.settings["profile"]).write_text("h:0 0.3\nh:1 0.1\nh:2 0.31\n")
        steps = [steps_line([WorkerRound(8, seconds, 0.0)] * 4) for seconds in (0.3, 0.1, 0.31)]
        Path(spec.settings["profile_steps"]).write_text(steps_text(steps, 0.0, hands_out=True))
        return 0

    found = with_measured_groups(SPEC, run)
    assert isinstance(found, JobSpec)
    choice = parse_choice(found.settings["choice"], 3)
    assert found.settings == {
        "staleness": "2",
        "regroup_rounds": "5",
        "groups": "1; 0 2;",
        "choice": found.settings["choice"],
        "measured": found.settings["measured"],
    }
    assert (choice.store_type, choice.shares) == ("dist_sync", "measured")
    assert parse_measured(found.settings["measured"], 3).seconds == pytest.approx([0.3, 0.1, 0.31])
    assert found.max_restarts == 4
    measuring = {"profile", "profile_rounds", "profile_steps", "server_speeds"}
    assert ran[0].settings.keys() == {"staleness", "groups", *measuring}
    assert (ran[0].settings["groups"], ran[0].settings["profile_rounds"]) == ("auto", str(ROUNDS))
    assert ran[0].max_restarts == 0
    printed = capsys.readouterr().out
    assert "h:1  # 0.1 s per step" in printed
    assert f"dist_auto: {choice.sentence}" in printed


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


CHOICE = Choice("dist_ksync", Policy("first", first=2, lr_scale="sample"), "pool", "two of three are enough")


def chosen_store():
    try:
        store = paceline.kvstore.create("dist_auto")
    except ConfigError as error:
        return str(error)
    sampler = paceline.data.batch_sampler(64, store, batch_size=8)
    sampler.set_epoch(2)
    sampler.load_state_dict(sampler.state_dict() | {"epoch": 5})
    assert sampler.state_dict()["epoch"] == 5
    return store.type, store.policy.merge, store.policy.lr_scale, type(sampler).__name__, store.session.kind.hands_out


def test_dist_auto_does_what_was_chosen(tmp_path: Path) -> None:
    profile = str(tmp_path / "speeds")
    with LocalJob(num_workers=3, num_servers=1, choice=choice_text(CHOICE)) as job:
        assert job.run(chosen_store) == [["dist_auto", "first", "sample", "PooledBatchSampler", True]] * 3
    with LocalJob(num_workers=1, num_servers=1, choice=choice_text(CHOICE)) as job:
        assert "K is 2" in job.run(chosen_store)[0]
    with LocalJob(num_workers=1, num_servers=1, profile=profile) as job:
        assert job.run(chosen_store)[0][1:] == ["all", "update", "TwoSizes", True]
    with LocalJob(num_workers=1, num_servers=1) as job:
        assert "start the job with: paceline launch --groups auto" in job.run(chosen_store)[0]


def train_and_measure():
    store = paceline.kvstore.create("dist_auto")
    model = torch.nn.Linear(4, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
    try:
        for batch in paceline.data.batch_sampler(640, store, batch_size=8):
            model(torch.ones(len(batch), 4)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except SystemExit as end:
        return end.code
    return "the batches have ended"


def test_measured_steps_have_both_sizes(tmp_path: Path) -> None:
    speeds, steps = tmp_path / "speeds", tmp_path / "steps"
    settings = {"profile": str(speeds), "profile_steps": str(steps), "profile_rounds": "10"}
    with LocalJob(num_workers=2, num_servers=1, server_speeds="measured", **settings) as job:
        assert job.run(train_and_measure) == [0, 0]
    table = json.loads(steps.read_text())
    assert table["hands_out"]
    assert 0 < table["update_s"] < 0.1
    assert [[samples for samples, _, _ in worker] for worker in table["steps"]] == [[8.0] * 5 + [2.0] * 5] * 2
    assert len(parse_speeds(speeds.read_text())) == 2


def test_lack_of_scikit_learn_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_groups, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"pip install 'paceline\[hetero\]'"):
        with_measured_groups(SPEC, lambda spec: pytest.fail("the job was started"))


def test_folder_for_temporary_files_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert main(["launch", "--groups", "auto", "-n", "1", "--", "true"]) == 1
    said = (
        "paceline launch: No usable temporary directory found in ['/tmp']: set TMPDIR to a folder that can be written"
    )
    assert said in capsys.readouterr().err
