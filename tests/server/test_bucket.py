"""Slots that are cut in the middle of open cohorts, and pushes that must change nothing; one server, in memory."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Settings
from paceline.consistency import Policy
from paceline.layout.tensors import to_frame
from paceline.net.memory import MappedArena
from paceline.observe import meter
from paceline.server import push
from paceline.server.bucket import PushRequest, Slot
from paceline.server.members import STRANGER, Asker, Members
from paceline.server.merge import Accumulator, Contribution, Scratch
from paceline.server.requests import RequestHandler
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

    def __init__(
        self, policy: Policy, spec: UpdaterSpec | None, mean: bool = True, lengths: tuple[int, int] = (5, 7)
    ) -> None:
        self.answers: dict[tuple[bytes, int], tuple[m.Reply, Sequence[Any]]] = {}
        members = Members([m.Member("worker", rank, 0, "h", "x", 1, "", b"t") for rank in range(3)], "", 0)
        self.service = RequestHandler(Settings(num_workers=3), self._keep, Mock(), members)
        self.seq = 0
        for rank in range(3):
            self.ask(rank, m.Claim("worker", rank, b"t"))
        bound = -1 if policy.bound is None else policy.bound
        age = -1 if policy.age is None else policy.age
        groups = [list(group) for group in policy.groups]
        self.ask(0, m.OpenStore("s", policy.merge, groups, policy.first, bound, policy.weighting, mean, age=age))
        if spec is not None:
            self.ask(0, m.SetUpdater("s", msgspec.msgpack.encode(spec)))
        numel = sum(lengths)
        bucket = m.BucketSpec(0, numel, ["a", "b"], list(lengths), [[one] for one in lengths])
        self.ask(0, m.Init("s", 0, "float32", [bucket]), [to_frame(torch.linspace(-1.0, 1.0, numel))])
        self.store = self.service.stores["s"].own
        self.bucket = self.store.get(0, 0)

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

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(slot.span.start, slot.span.stop) for slot in self.bucket.slots]

    def state(self) -> list[tuple[str, int, list[float]]]:
        """The optimizer's state, key by key."""
        numel = len(self.values)
        seq = self.ask(0, m.GetState("s", [m.Entry(0, 0, 0, numel, 0)]))
        body = self.answer(0, seq)
        assert isinstance(body, m.StateIs)
        pairs = zip(body.items, self.frames(0, seq), strict=True)
        parts = [(one.name, one.start, torch.frombuffer(frame, dtype=torch.float32).tolist()) for one, frame in pairs]
        # A counter is there once for each part; what is kept per element is put together.
        names = sorted({name for name, _, _ in parts} - {"step"})
        whole = [(name, 0, [x for n, _, part in sorted(parts) if n == name for x in part]) for name in names]
        return [*whole, ("step", 0, sorted({part[0] for name, _, part in parts if name == "step"}))]


class Driver:
    """Pushes whole rounds of three workers, each cut into ranges as it pleases."""

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
    assert sum(slot.span.length for slot in cut.server.bucket.slots) == NUMEL


def test_worker_is_answered_once_when_all_its_ranges_are_released() -> None:
    server = OneServer(POLICIES["all"], None)
    first = server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    parts = [server.push(1, [(0, 4, 1)], torch.ones(NUMEL)), server.push(1, [(4, 8, 1)], torch.ones(NUMEL))]
    assert server.push(2, [(0, 6, 1)], torch.ones(NUMEL))
    assert server.answer(1, parts[0]) == m.Values()
    assert server.answer(0, first) is None
    server.push(2, [(6, 6, 1)], torch.ones(NUMEL))
    assert server.answer(0, first) == m.Values()
    assert server.answer(1, parts[1]) == m.Values()


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
    assert server.bucket.slots[0].rule.read == [0, 0, 1]


def test_group_of_one_reads_the_newest_values_and_keeps_none() -> None:
    server = OneServer(POLICIES["groups"], make_spec("sgd", lr=1.0))
    for rank in (2, 0, 1):
        server.push(rank, [(0, NUMEL, 1)], torch.ones(NUMEL))
    seq = server.ask(2, m.Pull("s", [m.Entry(0, 0, 0, NUMEL, 0)], False))
    assert server.bucket.slots[0].rule.read[2] == 2
    sent = server.answers[b"worker-2", seq][1][0]
    after = server.values
    assert torch.frombuffer(bytearray(sent), dtype=torch.float32).tolist() == after
    server.push(0, [(0, NUMEL, 2)], torch.ones(NUMEL))
    server.push(1, [(0, NUMEL, 2)], torch.ones(NUMEL))
    assert server.values != after
    assert torch.frombuffer(bytearray(sent), dtype=torch.float32).tolist() == after, "what was sent stands still"
    assert list(server.bucket.snapshots) == [0]
    everybody_alone = [[0], [1], [2]]
    for rank in range(3):
        server.ask(rank, m.Regroup("s", 1, everybody_alone))
    assert not server.bucket.snapshots


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


def test_values_and_state_are_asked_for_once_by_a_request() -> None:
    server, half = OneServer(POLICIES["each"], make_spec("sgd", lr=1.0)), m.Entry(0, 0, 0, NUMEL // 2, 0)
    twice = [m.Entry(0, 0, 0, NUMEL, 0), half]
    assert "pulled more than once" in server.refusal(0, server.ask(0, m.Pull("s", twice, False)))
    assert "asked for more than once" in server.refusal(0, server.ask(0, m.GetState("s", twice)))
    assert isinstance(server.answer(0, server.ask(0, m.Pull("s", [half], False))), m.Values)


def test_bucket_is_not_cut_into_any_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "MAX_PARTS", 4)
    server = OneServer(POLICIES["each"], make_spec("sgd", lr=1.0))
    parts = [(start, 1, 1) for start in range(NUMEL)]
    assert "12 parts of bucket 0 of block 0, which is in 1 already; at most 8" in server.refusal(
        0, server.push(0, parts, torch.ones(NUMEL))
    )
    assert len(server.bucket.slots) == 1
    for start in (0, 2, 4, 6):
        server.push(0, [(start, 1, 1)], torch.ones(NUMEL))
    assert len(server.bucket.slots) == 8
    assert "1 parts" in server.refusal(0, server.push(0, [(8, 1, 1)], torch.ones(NUMEL)))


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
    assert server.answer(0, server.ask(0, push)) == m.Values(), "a worker goes on at once"
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
        assert answer == m.Values()
        assert server.bucket.slots[0].rule.read[worker] == version
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
    assert server.answer(0, again) == m.Values()
    assert server.values == [3.0] * NUMEL
    assert not server.bucket.slots[0].cohorts, "what was applied is not kept"
    late = server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    assert server.answer(0, late) == m.Values()
    assert server.values == [3.0] * NUMEL


@pytest.mark.parametrize("notice", [m.Pause("s"), m.Away("s")])
@pytest.mark.parametrize("name", ["all", "groups"])
def test_answer_that_is_under_way_stays_as_it_is_while_others_go_on_without_the_worker(
    name: str, notice: m.Pause | m.Away
) -> None:
    server, sent = OneServer(POLICIES[name], make_spec("sgd", lr=0.5)), dict[bytes, Sequence[Any]]()
    server.service._answer = lambda peer, seq, body, frames, urgency: sent.update({peer: frames()})
    for round in (1, 2):
        for rank in (0, 1, 2)[round - 1 :]:
            server.push(rank, [(0, NUMEL, round)], torch.full((NUMEL,), float(round)))
            if rank == 0:
                server.ask(0, notice)
        if round == 1:
            [under_way] = sent[b"worker-0"]
            before = bytes(under_way)
    assert bytes(under_way) == before
    assert bytes(sent[b"worker-1"][0]) != before


def test_answer_that_cannot_be_made_is_an_error_and_the_update_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    server = OneServer(POLICIES["each"], make_spec("sgd", lr=1.0))
    start = server.values
    with monkeypatch.context() as patch:
        patch.setattr(server.store, "stands_still", Mock(side_effect=RuntimeError("no memory for a copy")))
        assert "no memory for a copy" in server.refusal(0, server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL)))
    server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    server.push(0, [(0, NUMEL, 2)], torch.ones(NUMEL))
    assert server.values == pytest.approx([one - 2.0 for one in start])


def test_leaver_is_not_waited_for_in_any_slot() -> None:
    server = OneServer(POLICIES["all"], None, mean=False)
    server.push(1, [(0, 4, 1)], torch.ones(NUMEL))
    waiting = server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    for rank in (1, 2):
        server.ask(rank, m.Leave("s"))
    assert server.answer(0, waiting) == m.Values()
    assert server.values == [2.0] * 4 + [1.0] * 8


def test_missing_are_those_who_have_not_pushed_a_range() -> None:
    server = OneServer(POLICIES["all"], None)
    server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    server.push(1, [(0, 4, 1)], torch.ones(NUMEL))
    for entry, missing in ((m.Entry(0, 0, 0, NUMEL, 0), [1, 2]), (m.Entry(0, 0, 0, 4, 0), [2])):
        answer = server.answer(0, server.ask(0, m.AskMissing("s", entry)))
        assert isinstance(answer, m.Missing)
        assert answer.workers == missing
        assert "worker 1 pushed round 1" in answer.story
    answer = server.answer(2, server.ask(2, m.AskMissing("s", m.Entry(0, 0, 0, NUMEL, 0))))
    assert answer == m.Missing([], ""), "worker 2 has pushed nothing, so it waits for nobody"


def test_story_of_a_slot_that_waits_is_short_enough_to_be_sent() -> None:
    server = OneServer(POLICIES["all"], None)
    server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    for slot in server.bucket.slots:
        slot.updater.pieces = tuple(dataclasses.replace(piece, key="\0" * 1024) for piece in slot.updater.pieces)
    answer = server.answer(0, server.ask(0, m.AskMissing("s", m.Entry(0, 0, 0, NUMEL, 0))))
    assert isinstance(answer, m.Missing)
    assert answer.workers == [1, 2]
    assert len(answer.story) == 4000


# ---- ranges that are only asked for, and slots that are one again ----------------------------------------------------

PART = m.Entry(0, 0, 2, 5, 0)


@pytest.mark.parametrize(
    "body",
    [
        m.Push("s", [m.Entry(0, 0, 2, 5, 7)], 1.0, b"", False, True, False),
        m.Push("s", [m.Entry(0, 0, 2, 5, 1), m.Entry(0, 0, 9, 9, 1)], 1.0, b"", False, True, False),
        m.Pull("s", [PART], False),
        m.AskMissing("s", PART),
        m.GetState("s", [PART]),
        m.SetValues("s", [PART]),
    ],
    ids=lambda body: type(body).__name__,
)
def test_requests_that_are_refused_or_only_ask_cut_nothing(body: m.Request) -> None:
    server = OneServer(POLICIES["each"], make_spec("sgd", lr=1.0))
    server.ask(0, body, [bytes(20)])
    assert server.ranges == [(0, NUMEL)]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "adam") for name in POLICIES), ("all", "assign"), ("all", "sgd"), ("each", "adagrad")],
)
def test_slots_that_are_pushed_as_a_whole_again_are_one_and_as_if_they_had_never_been_joined(
    name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(joins: bool) -> OneServer:
        # Vectors of every width fit into halves, so that no element is computed in another way.
        server = OneServer(POLICIES[name], SPECS.get(optimizer), lengths=(32, 96))
        monkeypatch.setattr(Slot, "stands_like", stands_like if joins else lambda left, right: False)
        for round in range(1, 9):
            halves = round <= 5
            for start, length in [(0, 64), (64, 64)] if halves else [(0, 128)]:
                for rank in range(3):
                    values = torch.randn(128, generator=torch.Generator().manual_seed(10 * round + rank))
                    assert not why(server, rank, server.push(rank, [(start, length, round)], values, 1.0 + rank))
            if halves:
                assert server.ranges == [(0, 64), (64, 128)]
        return server

    def why(server: OneServer, rank: int, seq: int) -> str:
        body = server.answer(rank, seq)
        return body.text if isinstance(body, m.Failed) else ""

    stands_like = Slot.stands_like
    joined, apart = train(True), train(False)
    assert apart.ranges == [(0, 64), (64, 128)]
    if "first" not in name:  # there the third worker always waits in an open cohort
        assert joined.ranges == [(0, 128)]
    assert joined.values == apart.values
    assert joined.state() == apart.state()
    reports = [joined.report(), apart.report()]
    assert [one["updates"] / one["slots"] for one in reports] == [reports[0]["updates"] / reports[0]["slots"]] * 2


def test_slots_are_joined_when_no_cohort_is_open() -> None:
    server = OneServer(POLICIES["first"], make_spec("adam"))
    for round, length in ((1, 6), (2, NUMEL)):
        for start in range(0, NUMEL, length):
            for rank in range(2):
                server.push(rank, [(start, length, round)], torch.ones(NUMEL))
    assert server.ranges == [(0, NUMEL)]


@pytest.mark.parametrize("name", ["all", "each", "groups"])
def test_many_cuts_do_not_make_many_slots(name: str) -> None:
    server, chance = OneServer(POLICIES[name], SPECS["adam"], lengths=(500, 500)), random.Random(0)
    for round in range(1, 21):
        cut = chance.randrange(1, 1000)
        for rank in range(3):
            for start, stop in ((0, cut), (cut, 1000)):
                server.push(rank, [(start, stop - start, round)], torch.ones(1000))
        assert len(server.ranges) <= 3
    assert server.report()["updates"] / len(server.ranges) == pytest.approx(
        20 * {"all": 1, "each": 3, "groups": 2}[name]
    )


def test_neighbours_that_have_come_less_far_stay_apart() -> None:
    server = OneServer(POLICIES["all"], make_spec("sgd", lr=1.0))
    for entries in ([(0, 4, 1)], [(0, 4, 2), (4, 8, 1)]):
        for rank in range(3):
            server.push(rank, entries, torch.ones(NUMEL))
    assert server.ranges == [(0, 4), (4, 12)]
    server.bucket.cut(m.Span(0, 0, 0, NUMEL))
    assert server.ranges == [(0, 4), (4, 12)]
    for rank in range(3):
        server.push(rank, [(4, 8, 2)], torch.ones(NUMEL))
    server.bucket.cut(m.Span(0, 0, 0, NUMEL))
    assert server.ranges == [(0, NUMEL)]


@pytest.mark.parametrize("what", ["broken", "pending", "cohort"])
def test_slots_in_which_something_goes_on_stay_apart(what: str) -> None:
    server = OneServer(POLICIES["all"], make_spec("sgd", lr=1.0))
    left, right = server.bucket.cut(m.Span(0, 0, 0, 4))[0], server.bucket.cut(m.Span(0, 0, 4, 8))[0]
    if what == "broken":
        left.broken = right.broken = RuntimeError()
    elif what == "pending":
        asker = Asker(b"worker-0", 1, STRANGER, server._keep)
        right.pending[0] = left.pending[0] = PushRequest(
            asker=asker, worker=0, unreleased=1, reply=lambda request: None
        )
    else:
        right.cohorts[0] = left.cohorts[0] = Accumulator([], True, torch.float32, Scratch())
    assert server.bucket.cut(m.Span(0, 0, 0, NUMEL)) == [left, right]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("entries", [[(0, NUMEL, 1)], [(0, 5, 1), (5, 7, 1)]], ids=["one entry", "two entries"])
def test_the_worker_that_came_last_is_answered_first(
    order: tuple[int, ...], entries: list[tuple[int, int, int]]
) -> None:
    server = OneServer(POLICIES["all"], make_spec("sgd", lr=1.0))
    asked = [(b"worker-%d" % rank, server.push(rank, entries, torch.ones(NUMEL))) for rank in order]
    assert [one for one in server.answers if one in asked] == asked[::-1]


@pytest.mark.parametrize(
    ("policy", "pushes", "last"),
    [
        ("all", [(0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (0, 2)], [2, 0]),
        ("each", [(0, 1), (0, 2), (1, 1), (2, 1)], []),
        ("each, bound 1", [(0, 1), (1, 1), (0, 2), (1, 2), (2, 1), (2, 2)], [2]),
        ("first", [(0, 1), (1, 1), (2, 1), (0, 2)], []),
    ],
)
def test_who_came_last_is_told_where_others_have_waited_for_it(
    policy: str, pushes: list[tuple[int, int]], last: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(meter.active, "came_last", lambda worker, late_s: told.append(worker))
    server = OneServer(POLICIES[policy], make_spec("sgd", lr=1.0))
    for rank, round in pushes:
        server.push(rank, [(0, NUMEL, round)], torch.ones(NUMEL))
    assert told == last


def test_a_push_without_entries_is_refused() -> None:
    server = OneServer(POLICIES["all"], make_spec("sgd", lr=1.0))
    assert "a Push without entries" in server.refusal(1, server.push(1, [], torch.ones(NUMEL)))


def test_what_was_absent_is_known_of_joined_slots() -> None:
    server = OneServer(POLICIES["all"], make_spec("sgd", lr=1.0))
    left, right = server.bucket.cut(m.Span(0, 0, 0, 5))[0], server.bucket.cut(m.Span(0, 0, 5, 7))[0]
    left.readers.absent, right.readers.absent = {0: ((0, 5),)}, {0: ((0, 2),), 1: ((1, 7),)}
    [both] = server.bucket.cut(m.Span(0, 0, 0, NUMEL))
    assert both.readers.absent == {0: ((0, 7),), 1: ((6, 12),)}


def test_who_reads_a_slot_part_by_part_has_read_it_when_all_parts_are_of_one_version() -> None:
    server = OneServer(POLICIES["each"], make_spec("sgd", lr=1.0))
    rule = server.bucket.slots[0].rule

    def pull(start: int, length: int) -> int:
        body = server.answer(1, server.ask(1, m.Pull("s", [m.Entry(0, 0, start, length, 0)], False)))
        assert isinstance(body, m.Values)
        assert server.ranges == [(0, NUMEL)]
        return rule.readable(1)

    server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    assert [pull(0, 5), rule.read[1]] == [1, 0]
    server.push(0, [(0, NUMEL, 2)], torch.ones(NUMEL))
    assert [pull(5, 7), rule.read[1]] == [2, 0], "the first part was read before this version"
    assert [pull(2, 4), rule.read[1]] == [2, 0]
    assert [pull(0, 2), rule.read[1]] == [2, 2]
    server.push(0, [(0, NUMEL, 3)], torch.ones(NUMEL))
    assert [pull(0, NUMEL), rule.read[1]] == [3, 3]


def test_parts_that_were_read_stay_so_when_slots_are_cut_and_joined() -> None:
    server = OneServer(POLICIES["each"], make_spec("sgd", lr=1.0))
    server.push(0, [(0, NUMEL, 1)], torch.ones(NUMEL))
    server.store.read(1, m.Entry(0, 0, 2, 8, 0))
    left, right = server.bucket.cut(m.Span(0, 0, 0, 4))[0], server.bucket.cut(m.Span(0, 0, 4, 8))[0]
    assert left.rule.read[1] == right.rule.read[1] == 0
    [both] = server.bucket.cut(m.Span(0, 0, 0, NUMEL))
    server.store.read(1, m.Entry(0, 0, 0, 2, 0))
    assert both.rule.read[1] == 0
    server.store.read(1, m.Entry(0, 0, 10, 2, 0))
    assert both.rule.read[1] == 1
    server.bucket.cut(m.Span(0, 0, 0, 4))
    assert [slot.rule.read[1] for slot in server.bucket.slots] == [1, 1]


@pytest.mark.parametrize("cuts", [[(0, NUMEL, 1)], [(0, 5, 1), (5, 7, 1)]], ids=["one entry", "two entries"])
def test_a_sum_that_cannot_be_made_is_told_to_all_workers_at_once(
    cuts: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a codec that fails, or for lack of memory. Else the others would wait, and then miss a part in silence."""
    server = OneServer(POLICIES["all"], make_spec("sgd", lr=1.0))
    add, before = Accumulator.add, server.values

    def fail(self: Accumulator, worker: int, one: Contribution) -> None:
        if worker == 1:
            raise MemoryError("no room for a sum")
        add(self, worker, one)

    monkeypatch.setattr(Accumulator, "add", fail)
    first, second = (server.push(rank, cuts, torch.ones(NUMEL)) for rank in (0, 1))
    for text in (server.refusal(0, first), server.refusal(1, second)):
        assert "the update of 'a'" in text
        assert "MemoryError: no room for a sum" in text
    assert "no room for a sum" in server.refusal(2, server.push(2, cuts, torch.ones(NUMEL)))
    assert server.values == before
