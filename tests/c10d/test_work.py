"""The order of a group's operations, and the threads that run them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from paceline.c10d.work import Runner, Work
from paceline.errors import DeadlineError, PacelineError


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner("test")
    yield made
    assert made.close(10.0)


def me() -> int:
    return threading.get_ident()


def test_operation_that_the_caller_waits_for_runs_in_its_thread(runner: Runner) -> None:
    found: list[int] = []
    awaited = runner.run(Work("barrier", []), lambda: found.append(me()), is_awaited=True)
    assert awaited.is_completed()
    runner.run(Work("barrier", []), lambda: found.append(me())).wait()
    assert found[0] == me() != found[1]


def test_operation_runs_after_those_before_it_wherever_they_run(runner: Runner) -> None:
    order: list[str] = []
    may_go, has_begun = threading.Event(), threading.Event()

    def first() -> None:
        has_begun.set()
        assert may_go.wait(10)
        order.append("first")

    runner.run(Work("first", []), first)
    assert has_begun.wait(10)
    other = threading.Thread(
        target=lambda: runner.run(Work("second", []), lambda: order.append("second"), is_awaited=True).wait()
    )
    other.start()
    may_go.set()
    other.join(10)
    assert order == ["first", "second"]


def test_thread_runs_nothing_while_the_caller_runs_an_operation(runner: Runner) -> None:
    order: list[str] = []
    queued: list[Work] = []

    def first() -> None:
        other = threading.Thread(
            target=lambda: queued.append(runner.run(Work("second", []), lambda: order.append("second")))
        )
        other.start()
        other.join(10)
        with pytest.raises(DeadlineError, match=r"second did not end within 0\.05 s; it goes on"):
            queued[0].wait(timedelta(seconds=0.05))
        order.append("first")

    runner.run(Work("first", []), first, is_awaited=True).wait()
    queued[0].wait()
    assert order == ["first", "second"]


def test_callback_of_an_operation_can_wait_for_another_one(runner: Runner) -> None:
    """As hooks of DDP do: PowerSGD reduces a second tensor when the first one is there."""
    order: list[str] = []
    may_go = threading.Event()

    def nested(done: object) -> None:
        order.append("callback")
        runner.run(Work("nested", []), lambda: order.append("nested")).get_future().wait()

    first = runner.run(Work("first", [torch.zeros(1)]), lambda: int(may_go.wait(10)))
    after = first.get_future().then(nested)
    later = runner.run(Work("later", []), lambda: order.append("later"))
    may_go.set()
    after.wait()
    later.wait()
    assert order == ["callback", "nested", "later"]


def test_operation_that_fails_in_the_callers_thread_breaks_later_ones(runner: Runner) -> None:
    def fail() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        runner.run(Work("first", []), fail, is_awaited=True).wait()
    with pytest.raises(PacelineError, match=r"second was not started.*has failed \(first\)"):
        runner.run(Work("second", []), lambda: None).wait()
