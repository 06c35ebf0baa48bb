"""The account of this process: rounds, threads, collections, loaders."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from paceline.observe import meter
from paceline.observe.account import (
    APPLY,
    COMPUTE,
    DATA,
    DEVICE,
    GC,
    OTHER,
    RECEIVE,
    REST,
    SEND,
    SERVER_GC,
    SERVER_PARTS,
    UPDATE,
    WAIT,
    WORKER_PARTS,
    Steps,
    joined,
)
from paceline.observe.meter import Meter


class Clock:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def one(clock: Clock) -> Iterator[Meter]:
    made = Meter(clock=clock)
    meter.start(made)
    yield made
    meter.stop(made)


def test_time_before_the_first_push_is_no_round(one: Meter, clock: Clock) -> None:
    clock.now += 50.0
    one.end_round(1, 8.0)
    clock.now += 1.0
    one.end_round(2, 8.0)
    assert [(steps.round, steps.rounds, steps.samples, steps.wall_s) for steps in one.take()] == [(2, 1, 8.0, 1.0)]
    assert one.take() == []


def test_every_round_is_given_to_its_reader_with_its_parts(one: Meter, clock: Clock) -> None:
    found: list[Steps] = []
    one.on_round = found.append
    one.end_round(1, 8.0)
    clock.now += 1.0
    before = meter.active.enter(WAIT)
    assert one.open_own_s is None
    clock.now += 2.0
    meter.active.leave(before)
    assert one.open_own_s == 1.0
    one.end_round(2, 8.0)
    (steps,) = found
    assert (steps.seconds[COMPUTE], steps.seconds[WAIT], one.waited_s) == (1.0, 2.0, 2.0)


@pytest.mark.parametrize("seed", range(5))
def test_parts_sum_up_to_the_time_of_a_round(one: Meter, clock: Clock, seed: int) -> None:
    chance = random.Random(seed)
    stack: list[int] = []
    one.end_round(1, 1.0)
    begun = clock.now
    for number in range(500):
        clock.now += chance.expovariate(100)
        if stack and chance.random() < 0.5:
            one.leave(stack.pop())
        else:
            stack.append(one.enter(chance.randrange(len(WORKER_PARTS))))
        if chance.random() < 0.05:
            clock.now += 0.25
            one.end_round(2 + number, 1.0)
            (steps,) = one.take()
            assert steps.wall_s == pytest.approx(clock.now - begun, rel=1e-9)
            begun = clock.now


def test_local_steps_are_counted_by_round_and_the_first_one_ends_the_start(one: Meter, clock: Clock) -> None:
    for _ in range(4):
        clock.now += 1.0
        one.note_local_step()
    assert one.open_steps == 3
    clock.now += 0.5
    one.end_round(1, 8.0)
    assert one.open_steps == 0
    in_thread(one.note_local_step)
    clock.now += 2.0
    one.note_local_step()
    one.end_round(2, 8.0)
    found = joined(one._steps)
    assert [(one.steps, one.wall_s) for one in (*one._steps, found)] == [(3, 3.5), (1, 2.0), (4, 5.5)]


def test_part_inside_of_another_one_is_not_counted_twice(one: Meter, clock: Clock) -> None:
    one.end_round(1, 1.0)
    clock.now += 1.0
    outer = one.enter(DATA)
    clock.now += 1.0
    inner = one.enter(SEND)
    clock.now += 0.5
    one.leave(inner)
    clock.now += 1.5
    one.leave(outer)
    clock.now += 1.0
    one.end_round(2, 1.0)
    (steps,) = one.take()
    assert (steps.seconds[COMPUTE], steps.seconds[DATA], steps.seconds[SEND]) == (2.0, 2.5, 0.5)


def test_collection_in_the_middle_of_a_switch_is_in_the_sum_once(one: Meter, clock: Clock) -> None:
    """Python may collect in the call of the clock, after the time was read."""
    one.end_round(1, 1.0)
    clock.now += 1.0

    def now() -> float:
        read, one.now = clock.now, clock
        one.collects("start", {})
        clock.now += 0.25
        one.collects("stop", {})
        return read

    one.now = now
    one.enter(SEND)
    clock.now += 1.0
    one.end_round(2, 1.0)
    (steps,) = one.take()
    assert (steps.wall_s, steps.seconds[GC]) == (2.25, 0.25)


def test_time_on_the_way_is_that_of_its_round(one: Meter, clock: Clock) -> None:
    one.end_round(1, 8.0)
    for round, ways in ((2, [0.5, 0.25]), (3, []), (4, [1.0])):
        clock.now += 2.0
        for way_s in ways:
            one.note_way(way_s)
        one.end_round(round, 8.0)
    assert [window.way for window in one.report().windows] == [750_000, 0, 1_000_000]


def test_wait_for_the_last_exchange_beside_the_thread_is_no_computation(one: Meter, clock: Clock) -> None:
    found: list[Steps] = []
    one.on_round = found.append
    one.end_round(1, 8.0)
    clock.now += 1.0
    early = one.begin_exchange()
    clock.now += 2.0  # the backward pass goes on
    one.end_exchange(early)
    last = one.begin_exchange()
    clock.now += 4.0
    assert one.open_own_s == 3.0
    one.end_exchange(last, device_s=1.0)
    clock.now += 0.5
    assert one.open_own_s == 3.5
    assert one.await_exchange()
    assert not one.await_exchange()
    one.end_round(2, 8.0)
    (steps,) = found
    assert (steps.seconds[COMPUTE], steps.seconds[WAIT], steps.seconds[DEVICE]) == (3.5, 3.0, 1.0)


def test_rest_of_a_script_is_no_computation_once_the_forward_pass_is_known(one: Meter, clock: Clock) -> None:
    one.end_round(1, 1.0)
    meter.active.forward_begins()
    meter.active.step_ends()
    clock.now += 3.0
    before = meter.active.enter(DATA)
    clock.now += 0.5
    meter.active.leave(before)
    clock.now += 1.0
    meter.active.forward_begins()
    clock.now += 0.25
    one.end_round(2, 1.0)
    (steps,) = one.take()
    assert (steps.seconds[OTHER], steps.seconds[DATA], steps.seconds[COMPUTE]) == (4.0, 0.5, 0.25)


def test_step_without_a_known_forward_pass_is_followed_by_computation(one: Meter, clock: Clock) -> None:
    one.end_round(1, 1.0)
    before = meter.active.enter(UPDATE)
    assert before == COMPUTE
    clock.now += 1.0
    meter.active.step_ends()
    clock.now += 2.0
    one.end_round(2, 1.0)
    (steps,) = one.take()
    assert (steps.seconds[UPDATE], steps.seconds[COMPUTE], steps.seconds[OTHER]) == (1.0, 2.0, 0.0)


def test_error_in_a_part_of_a_server_ends_with_its_turn() -> None:
    clock = Clock()
    server = Meter(SERVER_PARTS, REST, SERVER_GC, clock)
    server.end_turn()
    clock.now += 1.0
    server.end_turn()  # the first window is the start
    server.enter(APPLY)  # it raises, and nobody leaves the part
    server.end_turn()
    before = server.enter(RECEIVE)
    clock.now += 0.1
    server.leave(before)
    clock.now += 1.0
    server.end_turn()
    (steps,) = server.take()
    assert (steps.seconds[APPLY], steps.seconds[REST]) == (0.0, 1.0)


def in_thread(call: object, *arguments: object) -> None:
    thread = threading.Thread(target=call, args=arguments)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_other_threads_change_nothing_and_may_end_a_round(one: Meter, clock: Clock) -> None:
    one.end_round(1, 1.0)
    in_thread(lambda: meter.active.leave(meter.active.enter(SEND)))
    clock.now += 1.0
    in_thread(one.end_round, 2, 4.0)
    before = meter.active.enter(WAIT)  # here the round ends in the account
    clock.now += 1.0
    meter.active.leave(before)
    (steps,) = one.take()
    assert (steps.round, steps.samples, steps.wall_s, steps.seconds[SEND]) == (2, 4.0, 1.0, 0.0)


def test_thread_that_trains_alone_takes_the_account_over(one: Meter, clock: Clock) -> None:
    def train() -> None:
        for round in range(1, 6):
            one.end_round(round, 1.0)
            before = meter.active.enter(WAIT)
            clock.now += 1.0
            meter.active.leave(before)

    in_thread(train)
    assert [(steps.round, steps.seconds[WAIT]) for steps in one.take()][-1] == (5, 1.0)


def test_collection_counts_apart_from_the_part_in_which_it_happens() -> None:
    made = Meter()
    meter.start(made)
    try:
        made.end_round(1, 1.0)
        before = meter.active.enter(DATA)
        gc.collect()
        meter.active.leave(before)
        made.end_round(2, 1.0)
    finally:
        meter.stop(made)
    (steps,) = made.take()
    assert steps.seconds[GC] > 0
    assert made.collects not in gc.callbacks


class Slow(torch.utils.data.Dataset[int]):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.clock.now += 2.0
        return index


def test_data_loader_counts_as_data(one: Meter, clock: Clock) -> None:
    one.end_round(1, 1.0)
    for _ in torch.utils.data.DataLoader(Slow(clock), batch_size=2):
        clock.now += 1.0
    one.end_round(2, 1.0)
    (steps,) = one.take()
    assert (steps.seconds[DATA], steps.seconds[COMPUTE]) == (8.0, 2.0)


def test_loader_of_a_process_without_account_works_as_ever() -> None:
    meter.watch_loaders()
    assert [int(one) for one in torch.utils.data.DataLoader(range(3), batch_size=1)] == [0, 1, 2]  # type: ignore[arg-type]


def test_many_rounds_between_two_heartbeats_are_joined(one: Meter, clock: Clock) -> None:
    for round in range(1, 5001):
        one.end_round(round, 1.0)
        clock.now += 0.001
    windows = one.take()
    assert len(windows) == meter.MAX_WINDOWS
    assert sum(steps.rounds for steps in windows) == 4999


def test_parts_cost_little() -> None:
    """A step has about twenty parts; 40 us are 0.5 % of a step of 8 ms."""
    made = Meter()
    meter.start(made)
    tracer = sys.gettrace()  # that of coverage, which makes every line dearer
    sys.settrace(None)
    try:
        best = min(timed_parts() for _ in range(20))
    finally:
        sys.settrace(tracer)
        meter.stop(made)
    assert best < 40e-6


def timed_parts() -> float:
    begun = time.perf_counter()
    for _ in range(20):
        meter.active.leave(meter.active.enter(SEND))
    return time.perf_counter() - begun


def test_servers_account_has_staleness_since_the_last_heartbeat_and_what_the_server_holds_now(one: Meter) -> None:
    for staleness in (1, 1, 3):
        one.note_staleness(staleness)
    one.hold(100, 2)
    one.hold(-40, -1)
    first, second = one.report(), one.report()
    assert (sorted(first.staleness), first.held) == ([(1, 2), (3, 1)], (60, 1))
    assert (second.staleness, second.held) == ([], (60, 1))
