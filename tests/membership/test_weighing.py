"""How the workers of a job weigh: a line at the start, and warnings where that may be wrong."""

from __future__ import annotations

import pytest

from paceline.membership import Warn
from paceline.membership.told_steps import ToldSteps
from paceline.wire import messages as m
from tests.membership.test_machine import JOB, joined

DEALT, UNKNOWN = m.StepBatch("dealt", 32.0), m.StepBatch("unknown", 1.0, shapes="[32, 20]", why="batch_dim is not set")
NONE = m.StepBatch("")


def lines(told: ToldSteps, step: int, *batches: m.StepBatch | None, optimizer: str = "s") -> list[str]:
    """Let workers tell of one step; return the lines."""
    for rank, one in enumerate(batches):
        if one is not None:
            told.note(rank, [m.WorkerStep(optimizer, step, batch=one)])
    return told.check(lambda: range(len(batches)))


@pytest.mark.parametrize(
    ("way", "how"),
    [
        ("dealt", "workers weigh by the samples that a sampler of paceline deals"),
        ("given", "workers weigh by the samples that the script sets as optimizer.samples"),
        ("inputs", "workers weigh by the samples in the inputs of the model, as batch_dim says"),
        ("equal", "workers weigh equally, as weigh='equal' says"),
        ("sum", "workers weigh equally: gradients are added up, as reduction='sum' says"),
        ("each", "workers weigh equally: each push is an update by itself"),
    ],
)
def test_one_line_says_how_workers_weigh(way: m.Way, how: str) -> None:
    told = ToldSteps()
    assert lines(told, 1, m.StepBatch(way, 3.0), None) == []
    assert lines(told, 1, None, m.StepBatch(way, 5.0)) == [how]
    assert lines(told, 2, m.StepBatch(way, 3.0), m.StepBatch(way, 5.0)) == []
    assert lines(told, 1, m.StepBatch(way, 3.0), m.StepBatch(way, 5.0), optimizer="another one") == []
    assert told.weighing.lines == [how]


def test_what_is_missing_where_samples_are_not_known_is_said() -> None:
    [line] = lines(ToldSteps(), 1, UNKNOWN, UNKNOWN)
    assert line == (
        "workers weigh equally, as with DistributedDataParallel: no sampler of paceline deals the batches, "
        "optimizer.samples is not set, and batch_dim is not set"
    )


def test_workers_that_know_in_several_ways_are_told_apart() -> None:
    [line] = lines(ToldSteps(), 1, DEALT, m.StepBatch("given", 8.0), DEALT)
    assert line.startswith("workers 0, 2 weigh by the samples that a sampler of paceline deals; worker 1 weighs by ")


def test_a_worker_that_does_not_know_its_samples_beside_others_is_named_with_the_way_out() -> None:
    told = ToldSteps()
    [line] = lines(told, 1, UNKNOWN, DEALT, DEALT)
    assert line.startswith("worker 0 weighs 1, and workers 1-2 weigh by samples (32 on worker 1): no sampler")
    assert "set optimizer.samples to the size of each batch" in line
    assert line.endswith("on every worker")
    assert lines(told, 2, UNKNOWN, DEALT, DEALT) == []


def test_a_way_that_changes_is_said_and_a_batch_without_samples_changes_nothing() -> None:
    told = ToldSteps()
    assert len(lines(told, 1, DEALT, DEALT)) == 1
    assert lines(told, 2, DEALT, NONE) == []
    assert len(lines(told, 30, None, UNKNOWN)) == 1
    assert lines(told, 31, None, DEALT) == []  # as before


def test_workers_without_samples_have_nothing_to_say() -> None:
    told = ToldSteps()
    assert lines(told, 1, NONE, NONE) == []
    assert lines(told, 2, DEALT, NONE) == ["workers weigh by the samples that a sampler of paceline deals"]


def test_unequal_inputs_of_workers_that_do_not_know_their_samples_are_named_once() -> None:
    told, other = ToldSteps(), m.StepBatch("unknown", 1.0, shapes="[17, 20]", why="batch_dim is not set")
    assert len(lines(told, 1, UNKNOWN, UNKNOWN, NONE)) == 1
    [line] = lines(told, 2, UNKNOWN, NONE, other)
    assert line.startswith("inputs are [32, 20] on worker 0 and [17, 20] on worker 2, and workers weigh equally. ")
    assert "give batch_dim=" in line
    assert "weigh='equal'" in line
    assert lines(told, 3, UNKNOWN, UNKNOWN, other) == []
    assert lines(ToldSteps(), 1, DEALT, m.StepBatch("dealt", 17.0))[1:] == []


def test_a_job_says_few_lines_and_remembers_few_optimizers() -> None:
    told = ToldSteps()
    said = [
        line
        for number in range(100)
        for line in lines(told, 1, UNKNOWN, m.StepBatch("dealt", number + 1.0), optimizer=f"optimizer {number}")
    ]
    assert len(said) == 8
    for number in range(100):
        lines(told, 2, *[m.StepBatch("dealt", 1.0, 1.0, 1.0)] * 2, optimizer=f"optimizer {number}")
    weighing = told.weighing
    assert len(weighing._batches) == len(weighing._growth) == 16


def test_heartbeats_tell_it_and_the_status_shows_it() -> None:
    members = joined(JOB.replace(num_workers=2))
    for worker in range(2):
        members.handle(b"worker-%d" % worker, 2, m.Heartbeat(1, steps=[m.WorkerStep("s", 1, batch=DEALT)]), 1.0)
    how = "workers weigh by the samples that a sampler of paceline deals"
    assert [one.text for one in members.tick(1.1) if isinstance(one, Warn)] == [how]
    assert members.status(1.2).weighing == [how]


@pytest.mark.parametrize(("way", "says"), [("dealt", True), ("unknown", True), ("sum", False)])
def test_losses_that_grow_with_the_batch_are_named_once(way: m.Way, says: bool) -> None:
    told, said = ToldSteps(), []
    for step in range(1, 24):
        losses = [None if way == "sum" else size + step % 3 / 9 for size in (3.0, 6.0)]
        batches = [m.StepBatch(way, 1.0, size, loss) for size, loss in zip((3.0, 6.0), losses, strict=True)]
        said += lines(told, step, *batches)[step == 1 :]
    assert len(said) == says
    for line in said:
        assert line.startswith("losses grow with the batch, as sums over samples do: 3.222 for 3 samples on worker 0")
        assert line.endswith("give DistributedOptimizer reduction='sum'")
