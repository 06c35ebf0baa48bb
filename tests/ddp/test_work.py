"""The order of a group's operations, and the threads that run them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.ddp.work import Runner, Work
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


def test_operation_begins_in_the_callers_thread_while_the_one_before_is_under_way(runner: Runner) -> None:
    may_go, order = threading.Event(), list[object]()
    first = runner.run(Work("first", []), lambda: order.append(may_go.wait(10)))
    second = runner.run(Work("second", []), lambda: order.append("end"), begin=lambda: order.append(me()))
    assert order == [me()]
    may_go.set()
    second.wait()
    assert order == [me(), True, "end"]
    assert first.number < second.number


@pytest.mark.parametrize("is_same", [True, False])
def test_operation_on_the_tensor_of_one_under_way_begins_after_it(runner: Runner, is_same: bool) -> None:
    may_go, order = threading.Event(), list[str]()
    tensor = torch.zeros(4)
    other = tensor[2:] if is_same else torch.zeros(2)
    runner.run(Work("first", [tensor]), lambda: order.append(f"first {may_go.wait(10)}"))
    second = runner.run(Work("second", [other]), lambda: order.append("end"), begin=lambda: order.append("begin"))
    assert order == ([] if is_same else ["begin"])
    may_go.set()
    second.wait()
    assert order == (["first True", "end"] if is_same else ["begin", "first True", "end"])


def test_operation_that_cannot_begin_fails_and_breaks_later_ones(runner: Runner) -> None:
    ran: list[str] = []

    def begin() -> None:
        raise PacelineError("closed")

    with pytest.raises(PacelineError, match=r"^closed$"):
        runner.run(Work("first", []), lambda: ran.append("first"), begin=begin).wait()
    with pytest.raises(PacelineError, match="second was not started"):
        runner.run(Work("second", []), lambda: None, begin=lambda: ran.append("second")).wait()
    assert not ran


TAKE: dict[str, Callable[[Work], Any]] = {
    "by a script": lambda work: work.get_future(),
    "by a hook that another one wraps": eval("lambda work: work.get_future()", {"__name__": default_hooks.__name__}),
}


@pytest.mark.parametrize("take", list(TAKE))
@pytest.mark.parametrize("comes", ["before the next call", "after it", "once its operation is over"])
def test_operation_of_a_callback_comes_next_on_all_ranks_whenever_it_is_called(
    runner: Runner, comes: str, take: str
) -> None:
    is_over = comes == "once its operation is over"
    has_run, may_begin, may_go = threading.Event(), threading.Event(), threading.Event()
    first, inner, later = Work("first", []), Work("inner", []), Work("later", [])

    def call_inner(done: object) -> None:
        assert comes != "after it" or may_go.wait(10)
        runner.run(inner, lambda: None).wait()
        has_run.set()

    runner.run(first, lambda: int(is_over or may_begin.wait(10)))
    future = TAKE[take](first)
    if is_over:
        future.wait()
    future.then(call_inner)
    may_begin.set()
    assert comes == "after it" or has_run.wait(10)
    began: list[Work] = []
    runner.run(later, lambda: None, begin=lambda: began.append(later))
    may_go.set()
    later.wait()
    assert (first.number, inner.number, later.number) == (1, 2, 3)
    assert comes != "after it" or not began, "its number was not certain"
