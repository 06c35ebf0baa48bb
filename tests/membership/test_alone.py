"""Workers that exchange nothing, or train on the samples of others: one line, which names what the script lacks."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import Settings
from paceline.membership import Answer, Membership, Warn
from paceline.membership.alone import WAIT_S, Alone, alone_line
from paceline.wire import messages as m

JOINED = {0: 0, 1: 0}


def lines(*told: m.Training, workers: int = 2, rounds: dict[int, int] = JOINED) -> list[str]:
    alone = Alone(workers)
    for one in told:
        alone.note(one, 0.0)
    return alone.check(rounds, WAIT_S)


def both(**facts: Any) -> list[str]:
    return lines(*(m.Training(rank, **facts) for rank in (0, 1)))


@pytest.mark.parametrize(
    ("facts", "way_out"),
    [
        (
            {"steps": 1},
            'the script makes no store. Make one for all workers, store = paceline.kvstore.create("dist_sync")',
        ),
        ({"steps": 1, "store": "local"}, "the store 'local' is of one process. Make one for all workers"),
        ({"steps": 1, "store": "dist_sync"}, "optimizer = paceline.DistributedOptimizer(optimizer, kvstore=store"),
        ({"passes": 9, "store": "dist_async"}, "hooks of backward change the weights. Wrap the optimizer"),
        (
            {"steps": 1, "store": "dist_async", "wrapped": True},
            "Call step() of the DistributedOptimizer, not of another",
        ),
        ({"steps": 1, "store": "hvd"}, "hvd.DistributedOptimizer(optimizer)"),
        ({"steps": 1, "store": "ddp"}, "model = DistributedDataParallel(model)"),
        (
            {"steps": 1, "group": "gloo"},
            "train over gloo of torch.distributed, and this job has no part in it. Start it",
        ),
        ({"passes": 9, "exchanged": True, "unstepped": True}, "call optimizer.step() after backward"),
    ],
)
def test_the_line_about_workers_that_train_alone_names_what_is_missing(facts: dict[str, Any], way_out: str) -> None:
    [line] = both(**facts)
    assert line.startswith("workers 0-1 train ")
    assert way_out in line


def test_workers_that_exchange_or_do_not_train_are_no_news() -> None:
    assert both(store="dist_sync") == both(steps=9, exchanged=True) == []
    assert lines(m.Training(0, steps=9), m.Training(1, steps=9), rounds={0: 1, 1: 1}) == []


def test_unlike_reasons_and_late_workers_get_lines_of_their_own() -> None:
    first, second = lines(m.Training(0, "local", steps=1), m.Training(1, steps=1))
    assert first.startswith("worker 0 trains alone, and no gradient is exchanged: the store 'local'")
    assert second.startswith("worker 1 trains alone, and no gradient is exchanged: the script makes no store")
    alone = Alone(3)
    alone.note(m.Training(0, steps=1), 0.0)
    assert alone.check({}, 0.9 * WAIT_S) == []
    assert [line[:9] for line in alone.check({}, WAIT_S)] == ["worker 0 "]
    alone.note(m.Training(1, steps=1), 10.0)
    alone.note(m.Training(0, steps=7), 10.0)
    alone.note(m.Training(2, steps=1), 10.0)
    assert [line[:11] for line in alone.check({}, 10.0)] == ["workers 0-2"]
    alone.note(m.Training(2, steps=8), 11.0)
    assert alone.check({}, 99.0) == []


def test_the_end_repeats_what_still_holds() -> None:
    alone = Alone(2)
    alone.note(m.Training(0, "dist_sync", steps=1), 0.0)
    alone.note(m.Training(1, "dist_sync", steps=1), 0.0)
    assert len(alone.check(JOINED, 0.0)) == 1
    [line] = alone.end({0: 0, 1: 5})
    assert line.startswith("the job ends, and worker 0 trains alone")
    assert alone.end({0: 3, 1: 5}) == []


def test_equal_data_that_all_walk_are_named_unless_a_worker_has_its_own() -> None:
    def walk(rank: int, data: bytes = b"a") -> m.Training:
        return m.Training(rank, "dist_sync", steps=1, exchanged=True, samples=1437, data=data)

    [line] = lines(walk(0), walk(1))
    assert line.startswith("workers 0-1 walk all 1,437 samples each: no sampler divides them.")
    assert "sampler=paceline.data.ShardedSampler(data)" in line
    assert lines(walk(0), walk(1, b"b")) == lines(walk(0), walk(1, b"")) == lines(walk(0)) == []
    assert [one[:11] for one in lines(walk(0), walk(1, b"b"), walk(2, b"a"), workers=3)] == ["workers 0, "]


def test_equal_inputs_are_named_unless_they_are_always_the_same() -> None:
    def see(rank: int, *inputs: int, samples: int = 0) -> m.Training:
        return m.Training(rank, "dist_sync", exchanged=True, samples=samples, data=b"a", inputs=list(inputs))

    [line] = lines(see(0, 1, 2, 3), see(1, 1, 2, 3))
    assert line.startswith("workers 0-1 train on the same samples: the inputs of their models are equal in the first 3")
    assert lines(see(0, 1, 2, 3), see(1, 1, 2, 4)) == lines(see(0, 1, 2), see(1, 1, 2)) == []
    assert lines(see(0, 5, 5, 5), see(1, 5, 5, 5)) == []
    assert len(lines(see(0, 1, 2, 3, samples=9), see(1, 1, 2, 3, samples=9))) == 1


def test_workers_whose_loops_divide_the_batches_of_one_order_are_no_news() -> None:
    def walk(rank: int, order: int, *inputs: int, **more: Any) -> m.Training:
        return m.Training(
            rank, "dist_sync", steps=1, exchanged=True, samples=9, data=b"a", order=order, inputs=list(inputs), **more
        )

    assert lines(walk(0, 1, 1, 2, 3), walk(1, 1, 4, 5, 6)) == []
    assert len(lines(walk(0, 1, 1, 2, 3), walk(1, 1, 1, 2, 3))) == 1
    assert len(lines(walk(0, 1, 1, 2, 3), walk(1, 1))) == 1  # one of them is not known
    assert lines(walk(0, 1, losses=[1]), walk(1, 1, losses=[2])) == []
    assert len(lines(walk(0, 1, losses=[1]), walk(1, 1, losses=[1]))) == 1
    assert len(lines(walk(0, 1, 1, 2, 3, losses=[1]), walk(1, 1, 1, 2, 3, losses=[2]))) == 1  # chance in the model
    assert len(lines(walk(0, 0, 1, 2, 3), walk(1, 0, 4, 5, 6))) == 1  # an order of its own
    assert len(lines(walk(0, 7, 1, 2, 3), walk(1, 8, 4, 5, 6))) == 1


def test_scheduler_hears_workers_that_have_not_joined_and_says_why_they_do_not() -> None:
    members = Membership(Settings(num_workers=2, num_servers=1, start_timeout_s=60.0), 0.0, lambda: b"token")
    for rank in (0, 1):
        [answer] = members.handle(b"somebody", 1 + rank, m.Training(rank, "local", steps=5), 1.0)
        assert isinstance(answer, Answer)
        assert isinstance(answer.body, m.Done)
    [refusal] = members.handle(b"somebody", 3, m.Training(2, "local", steps=5), 1.0)
    assert isinstance(refusal, Answer)
    assert isinstance(refusal.body, m.Failed)
    assert "there is no worker 2: the job has 2" in refusal.body.text
    [line] = [one.text for one in members.tick(1.2) if isinstance(one, Warn)]
    assert line.startswith("workers 0-1 train alone")
    for turn in range(7, 320):
        members.tick(turn / 5)
    assert members.cause is not None
    assert "did not join within 60 s: workers 0-1 train alone, and no gradient is exchanged: the store" in (
        members.cause.reason
    )


def test_only_workers_that_exchange_nothing_are_why_processes_did_not_join() -> None:
    alone = Alone(2)
    alone.note(m.Training(0, steps=5, exchanged=True), 0.0)
    alone.note(m.Training(1, "local", steps=5), 0.0)
    assert alone.why_alone({}).startswith("worker 1 trains alone")
    assert alone.why_alone({1: 1}) == ""


@pytest.mark.parametrize("profile", ["", "-"])
def test_a_job_that_measures_rounds_ends_where_workers_make_none(profile: str) -> None:
    members = Membership(Settings(num_workers=2, num_servers=1, profile=profile), 0.0, lambda: b"token")
    members.tick(0.5)
    members.handle(b"somebody", 1, m.Training(1, group="gloo", steps=5), 1.0)
    members.tick(1.5)
    members.tick(2.0)
    assert (members.cause is not None) == bool(profile)
    if members.cause is not None:
        reason = members.cause.reason
        assert reason.startswith("nothing can be measured: worker 1 trains over gloo of torch.distributed")
        assert "Start it by paceline launch --ddp" in reason


def test_a_worker_of_a_job_without_scheduler_says_it_by_itself() -> None:
    assert alone_line(m.Training(1, steps=5)).startswith("worker 1 trains alone, and no gradient is exchanged")
    assert alone_line(m.Training(1, steps=5, exchanged=True)) == ""
