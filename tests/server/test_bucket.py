"""Slots that are cut in the middle of open cohorts, and pushes that must change nothing; one server, in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Settings
from paceline.consistency import Policy
from paceline.server.requests import RequestHandler
from paceline.tensors import to_frame
from paceline.transport.shared import MappedArena
from paceline.updaters import UpdaterSpec, make_spec
from paceline.wire import messages as m
from paceline.worker.block import Rounds

NUMEL = 12
GROUPS = ((0, 1), (2,))
POLICIES = {
    "all": Policy("all"),
    "each": Policy("each"),
    "each, bound 1": Policy("each", bound=1),
    "groups": Policy("groups", GROUPS, weighting="inverse"),
    "bounded groups": Policy("groups", GROUPS, bound=1),
    "first": Policy("first", first=2),
    "each, age 1": Policy("each", age=1),
    "first, age 0": Policy("first", first=4, age=0),
    "bounded first, age 1": Policy("first", first=2, bound=1, age=1),
}


class OneServer:
    """A service with one bucket of two keys and three workers; answers are kept."""

    def __init__(self, policy: Policy, spec: UpdaterSpec | None, mean: bool = True) -> None:
        self.answers: dict[tuple[bytes, int], tuple[m.Reply, Sequence[Any]]] = {}
        self.service = RequestHandler(Settings(num_workers=3), self._keep)
        self.service.admit([m.Member("worker", rank, 0, "h", "x", 1, "", b"t") for rank in range(3)])
        self.seq = 0
        for rank in range(3):
            self.ask(rank, m.Claim("worker", rank, b"t"))
        bound = -1 if policy.bound is None else policy.bound
        age = -1 if policy.age is None else policy.age
        groups = [list(group) for group in policy.groups]
        self.ask(0, m.OpenStore("s", policy.merge, groups, policy.first, bound, policy.weighting, mean, age=age))
        if spec is not None:
            self.ask(0, m.SetUpdater("s", msgspec.msgpack.encode(spec)))
        bucket = m.BucketSpec(0, NUMEL, ["a", "b"], [5, 7], [[5], [7]])
        self.ask(0, m.Init("s", 0, "float32", [bucket]), [to_frame(torch.linspace(-1.0, 1.0, NUMEL))])
        self.store = self.service._stores["s"][1]
        self.bucket = self.store.bucket(0, 0)

    def _keep(self, peer: bytes, seq: int, body: m.Reply, frames: Any, urgency: int | None) -> None:
        assert (peer, seq) not in self.answers, "answered twice"
        self.answers[peer, seq] = body, [bytearray(frame) for frame in frames()]

    def ask(self, rank: int, body: m.Request, frames: Sequence[Any] = ()) -> int:
        self.seq += 1
        self.service.handle(b"worker-%d" % rank, self.seq, body, frames)
        return self.seq

    def push(self, rank: int, entries: list[tuple[int, int, int]], values: torch.Tensor, samples: float = 1.0) -> int:
        listed = [m.Entry(0, 0, *entry) for entry in entries]
        frames = [bytearray(to_frame(values[start : start + length])) for start, length, _ in entries]
        return self.ask(rank, m.Push("s", listed, samples, b"", False, True, False), frames)

    def answer(self, rank: int, seq: int) -> m.Reply | None:
        return self.answers.get((b"worker-%d" % rank, seq), (None, ()))[0]

    def refusal(self, rank: int, seq: int) -> str:
        body = self.answer(rank, seq)
        assert isinstance(body, m.Failed)
        return body.text

    def frames(self, rank: int, seq: int) -> Sequence[Any]:
        return self.answers[b"worker-%d" % rank, seq][1]

    def report(self) -> dict[str, Any]:
        body = self.answer(0, self.ask(0, m.AskStats("s")))
        assert isinstance(body, m.StatsAre)
        return json.loads(body.body)

    @property
    def values(self) -> list[float]:
        return self.bucket.values.tolist()


class Driver:
    """Pushes whole rounds of three workers, each cut into stretches as it pleases."""

    def __init__(self, policy: Policy, spec: UpdaterSpec | None) -> None:
        self.server = OneServer(policy, spec)
        self.rounds = [Rounds(NUMEL) for _ in range(3)]
        self.open: list[list[int]] = [[], [], []]

    def can_push(self, rank: int) -> bool:
        self.open[rank] = [seq for seq in self.open[rank] if self.server.answer(rank, seq) is None]
        return not self.open[rank]

    def push(self, rank: int, round: int, cuts: Sequence[int]) -> None:
        values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * rank + round))
        edges = [0, *sorted(set(cuts)), NUMEL]
        for start, stop in pairwise(edges):
            if stop > start:
                entries = self.rounds[rank].next(start, stop - start)
                seq = self.server.push(rank, entries, values, samples=1.0 + rank)
                self.open[rank].append(seq)


SPECS = {
    "sgd": make_spec("sgd", lr=0.1, momentum=0.9),
    "adam": make_spec("adam", lr=0.05),
    "adagrad": make_spec("adagrad", lr=0.1),
}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), optimizer=st.sampled_from(sorted(SPECS)))
def test_pushes_in_any_pieces_give_the_values_of_whole_pushes(name: str, data: st.DataObject, optimizer: str) -> None:
    whole, cut = (Driver(POLICIES[name], SPECS[optimizer]) for _ in range(2))
    round_of = [0, 0, 0]
    for _ in range(data.draw(st.integers(3, 14))):
        ready = [rank for rank in range(3) if whole.can_push(rank)]
        assert ready == [rank for rank in range(3) if cut.can_push(rank)], "pieces are released as the whole is"
        rank = data.draw(st.sampled_from(ready))
        round_of[rank] += 1
        whole.push(rank, round_of[rank], [])
        cut.push(rank, round_of[rank], data.draw(st.lists(st.integers(1, NUMEL - 1), max_size=2)))
        # Vector and scalar code round differently, and a cut moves elements from one to the other.
        torch.testing.assert_close(cut.server.values, whole.server.values, rtol=1e-4, atol=1e-5)
    for slot in cut.server.bucket.slots:
        slot.rule.check()
    assert sum(slot.length for slot in cut.server.bucket.slots) == NUMEL


def test_worker_is_answered_once_when_all_its_stretches_are_released() -> None:
    server = OneServer(POLICIES["all"], None)
    first = server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    parts = [server.push(1, [(0, 4, 1)], torch.ones(NUMEL)), server.push(1, [(4, 8, 1)], torch.ones(NUMEL))]
    assert server.push(2, [(0, 6, 1)], torch.ones(NUMEL))
    assert server.answer(1, parts[0]) == m.Values([1])
    assert server.answer(0, first) is None
    server.push(2, [(6, 6, 1)], torch.ones(NUMEL))
    assert server.answer(0, first) == m.Values([1])
    assert server.answer(1, parts[1]) == m.Values([1])


def test_without_an_optimizer_the_merged_value_replaces_the_stored_one() -> None:
    server = OneServer(POLICIES["all"], None, mean=False)
    for rank in range(3):
        server.push(rank, [(0, NUMEL, 1)], torch.full((NUMEL,), 2.0))
    assert server.values == [6.0] * NUMEL


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.merge != "all"])
def test_stale_modes_need_an_optimizer(name: str) -> None:
    server = OneServer(POLICIES[name], None)
    before = server.values
    assert "set_optimizer" in server.refusal(0, server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL)))
    assert server.values == before


def test_group_reads_what_its_own_last_update_left() -> None:
    server = OneServer(POLICIES["groups"], make_spec("sgd", lr=1.0))
    start = server.values
    server.push(2, [(0, NUMEL, 1)], torch.ones(NUMEL))
    read = [server.ask(rank, m.Pull("s", [m.Entry(0, 0, 0, NUMEL, 0)], False)) for rank in range(3)]
    got = [
        torch.frombuffer(bytearray(server.answers[b"worker-%d" % r, seq][1][0]), dtype=torch.float32)
        for r, seq in enumerate(read)
    ]
    assert got[0].tolist() == got[1].tolist() == start
    assert got[2].tolist() == server.values
    assert [server.answer(rank, seq) for rank, seq in enumerate(read)] == [m.Values([0]), m.Values([0]), m.Values([1])]


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([(0, 13, 1)], "a bucket of 12"),
        ([(4, 0, 1)], "a bucket of 12"),
        ([(0, NUMEL, 2)], "came after round 0"),
        ([(0, 6, 1), (6, 6, 2)], "came after round 0"),
        ([(0, 6, 1), (4, 8, 1)], "more than once"),
        ([(0, 6, 1), (0, 6, 1)], "more than once"),
        ([(0, 6, 1), (4, 8, 2)], "more than once"),
    ],
)
def test_push_that_is_wrong_in_part_changes_nothing(entries: list[tuple[int, int, int]], why: str) -> None:
    server = OneServer(POLICIES["each"], make_spec("sgd", lr=1.0))
    before = server.values
    assert why in server.refusal(0, server.push(0, entries, torch.ones(NUMEL + 1)))
    assert server.values == before
    assert all(slot.rule.version == 0 and not slot.pending for slot in server.bucket.slots)


def test_refused_push_is_told_what_happened_to_the_slot() -> None:
    server = OneServer(POLICIES["each"], make_spec("sgd", lr=1.0))
    server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    story = server.refusal(1, server.push(1, [(0, NUMEL, 2)], torch.ones(NUMEL))).splitlines()
    assert story[0] == "round 2 of worker 1 came after round 0"
    assert story[1].startswith("what happened to 'a'")
    assert story[2] == "  worker 0 pushed round 1 (1 samples, read version 0): cohort 0"
    assert story[-1] == "  now version 1"


def test_first_k_takes_what_was_pushed_and_not_what_the_worker_computes_next() -> None:
    server = OneServer(POLICIES["first"], make_spec("sgd", lr=1.0), mean=False)
    arenas = [MappedArena(torch.zeros(NUMEL), torch.full((NUMEL,), 1.0 + rank)) for rank in range(2)]
    server.bucket.arenas.update(enumerate(arenas))
    server.bucket.values.zero_()
    push = m.Push("s", [m.Entry(0, 0, 0, NUMEL, 1)], 1.0, b"", False, True, True)
    assert server.answer(0, server.ask(0, push)) == m.Values([]), "a worker goes on at once"
    arenas[0].grads.fill_(1000.0)
    server.ask(1, push)
    assert server.values == [-3.0] * NUMEL
    assert arenas[0].grads.tolist() == [1000.0] * NUMEL


@pytest.mark.parametrize("shared", [True, False], ids=["in place", "frames"])
@settings(max_examples=20, deadline=None)
@given(
    pushes=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1.0, 3.0, 8.0])), max_size=24),
    batch=st.integers(1, 5),
)
def test_server_steps_with_the_mean_over_samples_of_fresh_gradients(
    shared: bool, pushes: list[tuple[int, float]], batch: int
) -> None:
    server = OneServer(Policy("first", first=batch, age=0), make_spec("sgd", lr=1.0))
    arenas = [MappedArena(torch.zeros(NUMEL), torch.zeros(NUMEL)) for _ in range(3)]
    server.bucket.arenas.update(enumerate(arenas))
    value, version, read, rounds = server.bucket.values.clone(), 0, [0, 0, 0], [0, 0, 0]
    gathered: list[tuple[torch.Tensor, float]] = []
    mass = dict.fromkeys(range(3), 0.0)
    for number, (worker, samples) in enumerate(pushes):
        rounds[worker] += 1
        gradient = torch.full((NUMEL,), float(number + 1))
        if shared:
            arenas[worker].grads.copy_(gradient)
            push = m.Push("s", [m.Entry(0, 0, 0, NUMEL, rounds[worker])], samples, b"", False, True, True)
            seq = server.ask(worker, push)
            arenas[worker].grads.fill_(float("nan"))
        else:
            seq = server.push(worker, [(0, NUMEL, rounds[worker])], gradient, samples)
        if read[worker] == version:
            gathered.append((gradient, samples))
            mass[worker] += samples
        if len(gathered) == batch:
            value = value - sum(one * count for one, count in gathered) / sum(count for _, count in gathered)
            gathered, version = [], version + 1
        read[worker] = version
        torch.testing.assert_close(server.bucket.values, value)
        answer = server.answer(worker, seq)
        assert answer == (m.Values([]) if shared else m.Values([version]))
        new = arenas[worker].values if shared else torch.frombuffer(server.frames(worker, seq)[0], dtype=torch.float32)
        assert new is not None
        assert torch.equal(new, server.bucket.values), "what is answered is fresh"
    [slot] = server.bucket.slots
    assert len(slot.cohorts) == bool(gathered), "what is dropped makes no accumulator"
    report = server.report()
    assert sum(report["dropped"].values()) == len(pushes) - batch * version - len(gathered)
    open_mass = sum(count for _, count in gathered)
    assert sum(report["data_mass"].values()) == sum(mass.values()) - open_mass


def test_stale_update_counts_with_its_weight() -> None:
    server = OneServer(Policy("each", weighting="inverse"), make_spec("sgd", lr=1.0))
    server.bucket.values.zero_()
    for round in (1, 2, 3):
        server.push(0, [(0, NUMEL, round)], torch.ones(NUMEL))
    server.push(1, [(0, NUMEL, 1)], torch.ones(NUMEL))
    assert server.values == [-3.25] * NUMEL
    assert server.report()["step_mass"] == 3.25


def test_push_that_is_sent_again_before_its_answer_counts_once_and_who_asked_last_is_answered() -> None:
    server = OneServer(POLICIES["all"], None, mean=False)
    first, again = (server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL)) for _ in range(2))
    for rank in (1, 2):
        server.push(rank, [(0, NUMEL, 1)], torch.ones(NUMEL))
    assert server.answer(0, first) is None
    assert server.answer(0, again) == m.Values([1])
    assert server.values == [3.0] * NUMEL
    assert not server.bucket.slots[0].cohorts, "what was applied is not kept"
    late = server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    assert server.answer(0, late) == m.Values([1])
    assert server.values == [3.0] * NUMEL


def test_leaver_is_not_waited_for_in_any_slot() -> None:
    server = OneServer(POLICIES["all"], None, mean=False)
    server.push(1, [(0, 4, 1)], torch.ones(NUMEL))
    waiting = server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    for rank in (1, 2):
        server.ask(rank, m.Leave("s"))
    assert server.answer(0, waiting) == m.Values([1])
    assert server.values == [2.0] * 4 + [1.0] * 8


def test_missing_are_those_who_have_not_pushed_a_stretch() -> None:
    server = OneServer(POLICIES["all"], None)
    server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    server.push(1, [(0, 4, 1)], torch.ones(NUMEL))
    asked = server.ask(0, m.AskMissing("s", m.Entry(0, 0, 0, NUMEL, 0)))
    assert server.answer(0, asked) == m.Missing([1, 2])
    asked = server.ask(0, m.AskMissing("s", m.Entry(0, 0, 0, 4, 0)))
    assert server.answer(0, asked) == m.Missing([2])
