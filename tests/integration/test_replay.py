"""One process replays the log of a job whose members come and go, and ends with the same weights, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.observe import ring
from paceline.testing import LocalJob
from tests.clusters import programs
from tests.integration import replaying
from tests.integration.replaying import check_weights, times_trained, train

LEAVER, DIES = 1, 2


@pytest.mark.parametrize(
    ("kind", "update", "how"),
    [
        ("shares", "worker", "leaves"),
        ("parts", "server", "leaves"),
        ("shares", "worker", "dies"),
        ("parts", "worker", "dies"),
    ],
)
def test_weights_are_those_of_one_process_that_replays_the_log(kind, update, how):
    with LocalJob(num_workers=4, num_servers=2, on_worker_death="continue") as job:
        workers = job.start_all(train, kind, update, LEAVER, DIES if how == "dies" else -1)
        assert workers[LEAVER].wait(60) == 0
        left = [0, 3] if how == "dies" else [0, 2, 3]
        weights = [workers[rank].result(60) for rank in left]
        job.scheduler.wait(60)
        log = check_weights(ring.folder_of("test", job.job_key), update, weights)
    kinds = [(one.kind, one.workers) for _, one in log.changes]
    assert kinds[:2] == [("starts", [0, 1, 2, 3]), ("left", [LEAVER])]
    assert (("died", [DIES]) in kinds) == (how == "dies")


@pytest.mark.parametrize(("update", "victim"), [("worker", 1), ("server", 1), ("worker", 0)])
def test_killed_worker_is_started_again_and_no_sample_is_lost_or_seen_twice(update, victim, tmp_path):
    words = [
        "-m",
        "paceline",
        "launch",
        "-n",
        3,
        "-s",
        2,
        "--replace",
        1,
        "--quiet",
        "--",
        "python",
        replaying.__file__,
    ]
    done = programs.run([*words, tmp_path, '"shares"', json.dumps(update), -1, victim, 1, "true"], timeout_s=300)
    assert done.returncode == 0, done.stderr
    told = [json.loads(Path(tmp_path, f"{rank}.json").read_text()) for rank in range(3)]
    log = check_weights(Path(told[0][0]), update, [weights for _, weights in told])
    assert [(one.kind, one.workers) for _, one in log.changes[:3]] == [
        ("starts", [0, 1, 2]), ("died", [victim]), ("joins", [victim]),
    ]  # fmt: skip
    assert all(counts == dict.fromkeys(range(replaying.LENGTH), 1) for counts in times_trained(log))
    assert any(victim in step.parts for step in log.steps() if step.round > log.changes[2][1].round)
