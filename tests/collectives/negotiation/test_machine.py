"""The negotiation machine: every rank runs the same operations in the same order, or gets the same error."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.negotiation.cache import RankCache
from paceline.collectives.negotiation.machine import Negotiation
from paceline.collectives.negotiation.messages import (
    UNLIKE,
    Action,
    Batch,
    Down,
    Key,
    NegotiationSettings,
    OperationRequest,
    Response,
    Submission,
)


def allreduce(name: str, **other: Any) -> OperationRequest:
    return OperationRequest("allreduce", name, **({"dtypes": ("float32",), "shapes": ((4,),)} | other))


def allgather(name: str, rows: int, **other: Any) -> OperationRequest:
    return OperationRequest("allgather", name, **({"dtypes": ("float32",), "shapes": ((rows, 2),)} | other))


@dataclass
class Rank:
    cache: RankCache = field(default_factory=RankCache)
    own: dict[Key, OperationRequest] = field(default_factory=dict)
    inbox: deque[Batch] = field(default_factory=deque)
    ran: list[Response] = field(default_factory=list)

    def take(self) -> None:
        for response in self.cache.take(self.inbox.popleft(), self.own.get):
            self.own.pop(response.request.key, None)
            self.ran.append(response)


def check(machine: Negotiation) -> None:
    """Check what must hold after each event."""
    busy = machine._busy()
    assert not busy & ~sum(1 << index for index in machine._cache.entries), "a bit of no entry"
    assert len(machine._cache.entries) <= machine._cache.capacity
    assert set(machine._cache.graves).isdisjoint(machine._cache.entries)
    assert {entry.key: entry.index for entry in machine._cache.entries.values()} == {
        key: entry.index for key, entry in machine._cache.by_key.items()
    }
    for key, pending in machine._pending.items():
        assert pending.requests
        assert key not in machine._cache.by_key, "an operation both cached and pending"
        assert machine._missing(key, pending.requests), "a complete operation that did not run"
    assert not machine._ready_bits(), "a complete cached operation that did not run"
    assert len(machine._joined) < machine.size


class Job:
    """A machine and ranks; what they send waits until the test delivers it."""

    def __init__(
        self, size: int, options: NegotiationSettings | None = None, sets: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        options = options or NegotiationSettings()
        self.machine = Negotiation(size, options, sets)
        self.ranks = [Rank() for _ in range(size)]
        self.outbox: list[deque[Submission]] = [deque() for _ in range(size)]
        self.other: list[Action] = []

    def send(self, rank: int, *requests: OperationRequest) -> None:
        one = self.ranks[rank]
        one.own |= {request.key: request for request in requests}
        self.outbox[rank].append(one.cache.submission({request.key: request for request in requests}))

    def deliver(self, rank: int, now: float = 0.0) -> None:
        self.note(self.machine.submit(rank, self.outbox[rank].popleft(), now))

    def note(self, actions: list[Action]) -> None:
        check(self.machine)
        for action in actions:
            if isinstance(action, Batch):
                for one in self.ranks:
                    one.inbox.append(action)
            else:
                self.other.append(action)

    def all_at_once(self, *requests: OperationRequest, now: float = 0.0) -> list[Response]:
        """Send one request per rank, deliver everything, and return what the last rank ran."""
        before = len(self.ranks[-1].ran)
        for rank, request in enumerate(requests):
            self.send(rank, request)
        self.settle(now)
        return self.ranks[-1].ran[before:]

    def settle(self, now: float = 0.0) -> None:
        for rank, box in enumerate(self.outbox):
            while box:
                self.deliver(rank, now)
        for one in self.ranks:
            while one.inbox:
                one.take()


def test_operation_runs_when_all_ranks_asked() -> None:
    job = Job(3)
    for rank in (2, 0):
        job.send(rank, allreduce("x"))
    job.settle()
    assert job.ranks[0].ran == []
    job.send(1, allreduce("x"))
    job.settle()
    assert all([one.request.name for one in rank.ran] == ["x"] for rank in job.ranks)


def test_second_time_is_one_bit() -> None:
    job = Job(2)
    first = job.all_at_once(allreduce("x"), allreduce("x"))
    job.send(0, allreduce("x"))
    assert job.outbox[0][0] == Submission(1, b"\x01")
    job.send(1, allreduce("x"))
    job.settle()
    assert job.ranks[0].ran == first * 2


def test_changed_request_of_one_rank_is_seen_by_all() -> None:
    job = Job(2)
    job.all_at_once(allreduce("x"), allreduce("x"))
    job.send(0, allreduce("x"))  # a bit
    job.send(1, allreduce("x", dtypes=("int32",)))
    job.settle()
    [_, second] = job.ranks[0].ran
    assert second.error.startswith(
        "Mismatched data types: One rank had type float32, but another rank had type int32. (rank 0"
    )
    assert job.all_at_once(allreduce("x"), allreduce("x"))[0].error == ""


def test_bit_of_a_forgotten_index_means_what_it_meant() -> None:
    job = Job(2, NegotiationSettings(cache_capacity=1))
    job.all_at_once(allreduce("x"), allreduce("x"))
    job.send(0, allreduce("x"))  # a bit, under way
    for rank in (0, 1):
        job.outbox[rank].append(job.ranks[rank].cache.submission({allreduce("y").key: allreduce("y")}))
        job.ranks[rank].own[allreduce("y").key] = allreduce("y")
    job.outbox[0].rotate(1)  # y of rank 0 overtakes nothing in a real job; here it brings the eviction first
    job.deliver(0)
    job.deliver(1)
    job.settle()
    job.send(1, allreduce("x"))
    job.settle()
    assert [one.request.name for one in job.ranks[1].ran] == ["x", "y", "x"]


def test_unlike_devices_are_in_the_response_and_cached() -> None:
    job = Job(2)
    [first] = job.all_at_once(allreduce("x"), allreduce("x", device="cuda"))
    assert (first.error, first.request.device) == ("", UNLIKE)
    job.send(1, allreduce("x", device="cuda"))
    assert job.outbox[1][0] == Submission(1, b"\x01")
    job.send(0, allreduce("x"))
    job.settle()
    assert job.ranks[0].ran == job.ranks[1].ran == [first] * 2
    [other] = job.all_at_once(allreduce("x", device="cuda"), allreduce("x", device="cuda"))
    assert other.request.device == "cuda"


def test_gathered_rows_are_in_the_response_and_cached() -> None:
    job = Job(2)
    [first] = job.all_at_once(allgather("x", 3), allgather("x", 5))
    assert first.dims == ((3, 5),)
    assert job.all_at_once(allgather("x", 3), allgather("x", 5)) == [first]
    assert job.all_at_once(allgather("x", 3), allgather("x", 0))[0].dims == ((3, 0),)


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (allreduce("x"), allreduce("x", dtypes=("int8",)), "Mismatched data types"),
        (allreduce("x"), allreduce("x", shapes=((5,),)), "Mismatched shapes"),
        (allreduce("x"), allreduce("x", shapes=((2, 2),)), "Mismatched numbers of dimensions"),
        (allreduce("x"), allreduce("x", op=3), "One rank had operation Sum, but another rank had operation Min"),
        (allreduce("x"), allreduce("x", prescale=2.0), "Mismatched prescale factors"),
        (allreduce("x"), allreduce("x", postscale=2.0), "Mismatched postscale factors"),
        (
            allreduce("x"),
            allreduce("x", dtypes=("float32",) * 2, shapes=((4,), (4,))),
            "Mismatched numbers of tensors",
        ),
        (
            OperationRequest("broadcast", "x", root=0),
            OperationRequest("broadcast", "x", root=1),
            "Mismatched root ranks",
        ),
        (allgather("x", 1), allgather("x", 1, shapes=((1, 3),)), "Mismatched shapes beyond the first"),
        (allgather("x", 1, shapes=((),)), allgather("x", 1, shapes=((),)), "rank-zero tensor"),
        (
            OperationRequest("reducescatter", "x", dtypes=("int8",), shapes=((4,),), op=0),
            OperationRequest("reducescatter", "x", dtypes=("int8",), shapes=((4,),), op=1),
            "Mismatched reduce operations",
        ),
        (
            OperationRequest("add_process_set", "x", ranks=(0,)),
            OperationRequest("add_process_set", "x", ranks=(1,)),
            "Mismatched process sets",
        ),
        (
            OperationRequest("broadcast", "x", root=7),
            OperationRequest("broadcast", "x", root=7),
            "root rank 7 is not in the process set",
        ),
    ],
)
def test_every_mismatch_is_an_error_on_all_ranks(ours: OperationRequest, theirs: OperationRequest, text: str) -> None:
    job = Job(2)
    [response] = job.all_at_once(ours, theirs)
    assert text in response.error
    assert "'x'" in response.error
    assert job.ranks[0].ran == job.ranks[1].ran
    assert job.machine.is_idle


def test_joined_ranks_are_not_waited_for_and_the_last_one_is_named() -> None:
    job = Job(3)
    job.all_at_once(*[allreduce("x")] * 3)
    job.send(0, allreduce("x"))
    job.send(1, OperationRequest("join", ""))
    job.send(2, allreduce("x"))
    job.settle()
    assert [one.request.name for one in job.ranks[1].ran] == ["x", "x"]
    [gathered] = job.all_at_once(allgather("y", 2))[:1] or [None]
    assert gathered is None
    job.send(2, allgather("y", 3))
    job.settle()
    assert job.ranks[1].ran[-1].dims == ((2, 0, 3),)
    job.send(2, OperationRequest("join", ""))
    job.send(0, OperationRequest("join", ""))
    job.settle()
    assert [one.ran[-1].value for one in job.ranks] == [2, 2, 2]


@pytest.mark.parametrize("kind", ["add_process_set", "allgather_object", "broadcast"])
def test_what_joined_ranks_cannot_bring_is_an_error(kind: str) -> None:
    job = Job(2)
    job.send(0, OperationRequest(kind, "x", root=1, ranks=(0,), dtypes=("int8",), shapes=((1,),)))
    job.send(1, OperationRequest("join", ""))
    job.settle()
    assert "not supported with Join" in job.ranks[0].ran[0].error
    assert "rank 1" in job.ranks[0].ran[0].error


def test_process_sets_are_added_and_removed_by_all() -> None:
    job = Job(3, sets=((0, 1),))
    add = OperationRequest("add_process_set", "2", ranks=(1, 2))
    assert job.all_at_once(add, add, add)[0].value == 2
    assert "exists already" in job.all_at_once(add, add, add)[0].error
    for rank in (1, 2):
        job.send(rank, allreduce("x", process_set=2))
    job.settle()
    assert job.ranks[0].ran[-1].request.process_set == 2
    remove = OperationRequest("remove_process_set", "2", ranks=(1, 2))
    job.send(1, allreduce("x", process_set=2))
    job.settle()
    assert "pending operations" in job.all_at_once(remove, remove, remove)[0].error
    job.send(2, allreduce("x", process_set=2))
    job.settle()
    assert job.all_at_once(remove, remove, remove)[0].value == 2
    everything = OperationRequest("remove_process_set", "0", ranks=(0, 1, 2))
    assert job.all_at_once(everything, everything, everything)[0].value == -1
    assert job.all_at_once(add, add, add)[0].value == 3


def test_objects_reach_all_ranks() -> None:
    job = Job(2)
    [one] = job.all_at_once(
        *[OperationRequest("broadcast_object", "o", root=1, payload=bytes([rank])) for rank in range(2)]
    )
    assert one.payloads == (b"\x01",)
    [every] = job.all_at_once(*[OperationRequest("allgather_object", "o", payload=bytes([rank])) for rank in range(2)])
    assert every.payloads == (b"\0", b"\x01")


def test_stalls_are_reported_once_with_names_and_missing_ranks_and_end_the_job() -> None:
    job = Job(3, NegotiationSettings(stall_warning_s=60, stall_shutdown_s=100))
    job.all_at_once(*[allreduce("cached")] * 3)
    job.send(0, allreduce("x"), allreduce("cached"))
    job.send(1, allreduce("x"))
    job.settle(now=10)
    job.note(job.machine.tick(11))
    job.note(job.machine.tick(69))
    assert job.other == []
    job.note(job.machine.tick(71))
    job.note(job.machine.tick(72))
    [warning] = job.other
    assert isinstance(warning, str)
    assert "1: [allreduce.cached]\n2: [allreduce.x, allreduce.cached]" in warning
    job.note(job.machine.tick(112))
    assert isinstance(job.other[-1], Down)
    assert "2: [allreduce.x" in job.other[-1].reason
    assert job.machine.submit(0, Submission(0), 113) == []


def test_end_of_a_stall_names_operations_that_began_later_too() -> None:
    job = Job(2, NegotiationSettings(stall_warning_s=60, stall_shutdown_s=100))
    job.send(0, allreduce("early"))
    job.settle(now=10)
    job.send(1, allreduce("late"))
    job.settle(now=80)
    job.note(job.machine.tick(111))
    end = job.other[-1]
    assert isinstance(end, Down)
    assert "0: [allreduce.late]\n1: [allreduce.early]" in end.reason


def test_no_stall_check_with_a_time_of_0() -> None:
    job = Job(2, NegotiationSettings(stall_warning_s=0))
    job.send(0, allreduce("x"))
    job.settle()
    assert job.machine.tick(1e9) == []


@pytest.mark.parametrize("cached", [False, True])
def test_one_name_with_different_kinds_fails_on_all(cached: bool) -> None:
    job = Job(3, NegotiationSettings(conflict_s=5))
    if cached:
        job.all_at_once(*[allreduce("x")] * 3)
    before = len(job.ranks[0].ran)
    job.send(0, allreduce("x"))
    job.send(1, allgather("x", 1))
    job.settle()
    job.machine.tick(0)
    job.note(job.machine.tick(4))
    job.settle()
    assert len(job.ranks[0].ran) == before
    job.note(job.machine.tick(5))
    job.settle()
    assert sorted(one.request.kind for one in job.ranks[2].ran[before:]) == ["allgather", "allreduce"]
    assert "allgather: rank 1" in job.ranks[2].ran[-1].error
    job.send(2, allreduce("x"))  # it comes late, and must not wait for ever
    job.settle()
    assert "Mismatched operations" in job.ranks[2].ran[-1].error


def test_same_name_with_different_kinds_is_right_where_all_ranks_ask_for_both() -> None:
    job = Job(2, NegotiationSettings(conflict_s=5))
    job.send(0, allreduce("x"), allgather("x", 1))
    job.send(1, allgather("x", 1))
    job.settle()
    job.note(job.machine.tick(50))
    job.send(1, allreduce("x"))
    job.settle()
    assert [one.error for one in job.ranks[0].ran] == ["", ""]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ([allreduce("x")], [allreduce("x")], "submitted twice"),
        ([OperationRequest("join", "")], [OperationRequest("join", "")], "joined already"),
        ([OperationRequest("join", "")], [allreduce("x")], "although it has joined"),
        ([], [allreduce("x", process_set=9)], "not in process set 9"),
        ([], [OperationRequest("dance", "x")], "no kind of operation"),
    ],
)
def test_rank_that_breaks_the_protocol_ends_the_job(
    first: list[OperationRequest], second: list[OperationRequest], text: str
) -> None:
    machine = Negotiation(2, NegotiationSettings())
    machine.submit(0, Submission(0, requests=tuple(first)), 0.0)
    [down] = machine.submit(0, Submission(0, requests=tuple(second)), 0.0)
    assert isinstance(down, Down)
    assert down.rank == 0
    assert text in down.reason


def test_bits_that_nobody_was_given_end_the_job() -> None:
    machine = Negotiation(2, NegotiationSettings())
    machine.lose(1, "gone")
    assert machine.submit(0, Submission(0, b"\x01"), 0.0) == []
    machine = Negotiation(2, NegotiationSettings())
    [down] = machine.submit(0, Submission(0, b"\x01"), 0.0)
    assert isinstance(down, Down)


# ---- any order, any interleaving -------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**9), size=st.integers(1, 4), capacity=st.sampled_from([0, 1, 3, 100]), joins=st.booleans()
)
def test_all_ranks_run_the_same_whatever_the_order(seed: int, size: int, capacity: int, joins: bool) -> None:
    chance = random.Random(seed)
    sets = ((0,), (0, 1), (1, 2, 3)) if size == 4 else ()
    job = Job(size, NegotiationSettings(cache_capacity=capacity, stall_warning_s=0), sets)
    steps = 6
    plans: list[list[list[OperationRequest]]] = [[] for _ in range(size)]
    wanted: list[OperationRequest] = []
    for _ in range(steps):
        operations = [step_request(chance, number) for number in range(chance.randrange(1, 5))]
        if sets:
            operations += [allreduce("set", process_set=number) for number in range(1, 4) if chance.random() < 0.5]
        wanted += operations
        for rank in range(size):
            mine = [one for one in operations if rank in job.machine.sets.members(one.process_set)]
            chance.shuffle(mine)
            plans[rank].append([vary(one, rank) for one in mine])
    leaves = [steps - chance.randrange(3) if joins and not sets else steps for _ in range(size)]
    run(job, plans, leaves, chance, joins)
    assert all(one.ran == job.ranks[0].ran for one in job.ranks)
    assert all(not one.own for one in job.ranks)
    assert job.machine.is_idle
    assert job.other == []
    longest = max(leaves)
    if longest == steps and not joins:
        ran = sorted(one.request.key for one in job.ranks[0].ran)
        assert ran == sorted(one.key for one in wanted)
    assert not [one.error for one in job.ranks[0].ran if one.error]


def step_request(chance: random.Random, number: int) -> OperationRequest:
    name = f"t{number}"
    return chance.choice([allreduce(name), allreduce(name, shapes=((chance.randrange(1, 3),),)), allgather(name, 1)])


def vary(request: OperationRequest, rank: int) -> OperationRequest:
    if request.kind != "allgather":
        return request
    return allgather(request.name, rank + 1)


def run(
    job: Job, plans: list[list[list[OperationRequest]]], leaves: list[int], chance: random.Random, joins: bool
) -> None:
    """Let ranks go step by step, each when its operations are done, with everything else in random order."""
    at = [0] * len(plans)
    has_joined = [False] * len(plans)
    for _ in range(20_000):
        moves: list[tuple[str, int]] = []
        for rank, one in enumerate(job.ranks):
            if job.outbox[rank]:
                moves.append(("deliver", rank))
            if one.inbox:
                moves.append(("take", rank))
            if not one.own and at[rank] < leaves[rank]:
                moves.append(("step", rank))
            if not one.own and at[rank] == leaves[rank] and joins and not has_joined[rank]:
                moves.append(("join", rank))
        if not moves:
            return
        move, rank = chance.choice(moves)
        if move == "deliver":
            job.deliver(rank)
        elif move == "take":
            job.ranks[rank].take()
        elif move == "join":
            has_joined[rank] = True
            job.outbox[rank].append(job.ranks[rank].cache.submission({(0, "join", ""): OperationRequest("join", "")}))
        else:
            requests = plans[rank][at[rank]]
            at[rank] += 1
            cut = chance.randrange(len(requests) + 1)
            for part in (requests[:cut], requests[cut:]):
                if part:
                    job.send(rank, *part)
    raise AssertionError("it does not come to an end")
