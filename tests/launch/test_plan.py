from __future__ import annotations

import pytest

from paceline.launch import JobPlan, JobSpec, Late, Machine, ProcessSpec, describe, make_plan


def process(role: str, rank: int) -> ProcessSpec:
    return ProcessSpec(role, rank, ("true",), {"KEY": Late.JOB_KEY, "NAME": "x"})


def test_late_values_are_filled_in() -> None:
    assert process("worker", 0).environment({Late.JOB_KEY: "secret"}) == {"KEY": "secret", "NAME": "x"}


def test_late_value_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(KeyError):
        process("worker", 0).environment({})


def test_plan_knows_which_late_values_it_needs() -> None:
    plan = JobPlan((process("worker", 0),))
    assert plan.needs(Late.JOB_KEY)
    assert not plan.needs(Late.MASTER_PORT)


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ([("server", 0)], "at least one worker"),
        ([("scheduler", 0), ("scheduler", 1), ("worker", 0)], "one scheduler, not 2"),
        ([("worker", 0), ("worker", 0)], "worker 0 is in the plan 2 times"),
    ],
)
def test_impossible_plan_is_refused(processes: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobPlan(tuple(process(*one) for one in processes))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://me:hunter2@db:5432/x", "postgres://me:***@db:5432/x"),
        ("http://me:p@ss:hunter2@proxy:8080", "http://me:***@proxy:8080"),
        ("redis://:hunter2@cache", "redis://:***@cache"),
        ("https://hunter2@github.com/a/b.git", "https://***@github.com/a/b.git"),
        ("https://host/data?part=1&api_key=hunter2&x=y", "https://host/data?part=1&api_key=***&x=y"),
        ("s3://bucket?X-Amz-Signature=hunter2", "s3://bucket?X-Amz-Signature=***"),
        ("tcp://10.0.0.1:80/a@b", "tcp://10.0.0.1:80/a@b"),
        ("ssh://me@host:22", "ssh://me@host:22"),
        ("me@host:dir", "me@host:dir"),
    ],
)
def test_secrets_in_urls_are_masked(text: str, shown: str) -> None:
    spec = JobSpec(("train", f"--from={text}"), 1, env={"DATA": text})
    printed = describe(make_plan(spec, Machine("python")), [f"run {text}"], {"MORE": text})
    assert "hunter2" not in printed
    for line in ("  run ", "  train --from=", "    DATA=", "    MORE="):
        assert any(one.replace("'", "") == f"{line}{shown}" for one in printed.splitlines()), printed
