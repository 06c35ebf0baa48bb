"""The pull leg at a server: every unit of readers follows the values by what it was told, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import compression
from paceline.config import Settings
from paceline.consistency import Policy
from paceline.layout.tensors import to_frame
from paceline.net.memory import MappedArena
from paceline.server.members import Members
from paceline.server.readers import Readers
from paceline.server.requests import RequestHandler
from paceline.updaters import make_spec
from paceline.wire import messages as m
from paceline.worker.answers import store_known
from paceline.worker.block import WorkerBlock

NUMEL, WORKERS = 12, 3
POLICIES = {
    "all": Policy("all"),
    "each": Policy("each"),
    "groups": Policy("groups", ((0, 1), (2,)), weighting="inverse"),
    "first": Policy("first", first=2),
}


class Job:
    """A service with one bucket of two keys, and the arenas of three workers who read it; worker 0 by shared memory."""

    def __init__(
        self, policy: Policy, codec: str, updater: str = "sgd", shared: bool = True, compressed: bool = True
    ) -> None:
        made = compression.make(codec)
        assert made is not None
        self.codec = made
        members = Members([m.Member("worker", rank, 0, "h", "x", 1, "", b"t") for rank in range(WORKERS)], "", 0)
        self.service = RequestHandler(Settings(num_workers=WORKERS), self._keep, Mock(), members)
        keys = [m.KeySpec("a", [5], 0), m.KeySpec("b", [7], 0)]
        spec = m.BlockSpec(0, "float32", keys, [0], [], 1000, "balanced", False)
        self.blocks = [WorkerBlock(spec, 1, shared=False, still=False, via=lambda owner: owner) for _ in range(WORKERS)]
        self.answers: dict[tuple[int, int], tuple[m.Reply, Callable[[], Sequence[Any]]]] = {}
        self.asked: dict[tuple[int, int], tuple[Sequence[m.Entry], bool]] = {}
        self.seq = 0
        for rank in range(WORKERS):
            self.ask(rank, m.Claim("worker", rank, b"t"))
        groups = [list(group) for group in policy.groups]
        self.ask(0, m.OpenStore("s", policy.merge, groups, policy.first, -1, policy.weighting, True))
        spec_of_updater = make_spec(updater) if updater == "assign" else make_spec(updater, lr=0.1)
        self.ask(0, m.SetUpdater("s", msgspec.msgpack.encode(spec_of_updater)))
        if compressed:
            self.compress()
        bucket = m.BucketSpec(0, NUMEL, ["a", "b"], [5, 7], [[5], [7]])
        self.ask(0, m.Init("s", 0, "float32", [bucket]), [to_frame(torch.linspace(-1.0, 1.0, NUMEL))])
        self.bucket = self.service.stores["s"].own.get(0, 0)
        self.shared = {0} if shared else set()
        for rank in self.shared:
            self.bucket.arenas[rank] = MappedArena(self.blocks[rank].values[:NUMEL], self.blocks[rank].grads[:NUMEL])

    def compress(self) -> int:
        return self.ask(0, m.SetCompression("s", msgspec.msgpack.encode(self.codec.params()), "pull"))

    def _keep(
        self, peer: bytes, seq: int, body: m.Reply, frames: Callable[[], Sequence[Any]], urgency: int | None
    ) -> None:
        rank = int(peer)
        assert (rank, seq) not in self.answers, "answered twice"
        self.answers[rank, seq] = body, frames
        if isinstance(body, m.Values) and body.known:
            self.use(rank, seq)

    def use(self, rank: int, seq: int) -> None:
        """Have a worker use an answer, also when it comes again."""
        body, frames = self.answers[rank, seq]
        assert isinstance(body, m.Values)
        entries, shared = self.asked[rank, seq]
        store_known({0: self.blocks[rank]}, entries, shared, self.codec, body.known, [bytearray(f) for f in frames()])

    def ask(self, rank: int, body: m.Request, frames: Sequence[Any] = ()) -> int:
        self.seq += 1
        if isinstance(body, m.Push | m.Pull):
            self.asked[rank, self.seq] = body.entries, body.shared
        self.service.handle(b"%d" % rank, self.seq, body, frames)
        return self.seq

    def push(self, rank: int, spans: Sequence[tuple[int, int]], values: torch.Tensor, want: bool = True) -> int:
        rounds = self.blocks[rank].buckets[0].rounds
        entries = [m.Entry(0, 0, *piece) for span in spans for piece in rounds.next(*span)]
        shared = rank in self.shared
        self.blocks[rank].grads[:NUMEL].copy_(values)
        frames = [] if shared else [bytearray(to_frame(values[e.start : e.start + e.length])) for e in entries]
        return self.ask(rank, m.Push("s", entries, 1.0, b"", False, want, shared), frames)

    def pull(self, rank: int, start: int = 0, stop: int = NUMEL) -> int:
        return self.ask(rank, m.Pull("s", [m.Entry(0, 0, start, stop - start, 0)], rank in self.shared))

    def values_of(self, rank: int) -> list[float]:
        return self.blocks[rank].values[:NUMEL].tolist()

    def visible(self, rank: int) -> list[float]:
        return self.bucket.visible(self.service.stores["s"].own.units[rank]).tolist()

    def told(self, rank: int, seq: int) -> list[m.KnownRange]:
        body = self.answers[rank, seq][0]
        assert isinstance(body, m.Values), body
        return body.known


def random_values(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), codec=st.sampled_from(["int8", "int4", "fp16", "2bit", "topk", "chunktopk", "powersgd"]))
def test_answered_workers_hold_what_the_server_knows_of_them(name: str, data: st.DataObject, codec: str) -> None:
    job, waiting = Job(POLICIES[name], codec), [0] * WORKERS
    for step in range(data.draw(st.integers(1, 15))):
        ready = [rank for rank in range(WORKERS) if not waiting[rank] or (rank, waiting[rank]) in job.answers]
        if not ready:
            break
        rank = data.draw(st.sampled_from(ready))
        if data.draw(st.booleans()):
            job.pull(rank)
            assert job.values_of(rank) == job.visible(rank)
            if job.service.stores["s"].own.policy.merge in ("each", "first"):
                assert job.values_of(rank) == job.bucket.values.tolist()
            continue
        if data.draw(st.booleans()):
            start, stop = sorted(data.draw(st.tuples(st.integers(0, NUMEL), st.integers(0, NUMEL))))
            if start < stop:
                slots = [(slot.span.start, slot.span.stop) for slot in job.bucket.slots]
                job.pull(rank, start, stop)
                assert job.values_of(rank)[start:stop] == job.visible(rank)[start:stop]
                if job.service.stores["s"].own.policy.merge in ("each", "first"):
                    assert job.values_of(rank)[start:stop] == job.bucket.values[start:stop].tolist()
                assert [(slot.span.start, slot.span.stop) for slot in job.bucket.slots] == slots, "a pull cuts nothing"
            continue
        cut = data.draw(st.integers(0, NUMEL))
        spans = [(start, stop - start) for start, stop in ((0, cut), (cut, NUMEL)) if stop > start]
        want = data.draw(st.booleans())
        waiting[rank] = job.push(rank, spans, random_values(step), want)
        for other in range(WORKERS):
            if (other, waiting[other]) in job.answers and job.told(other, waiting[other]):
                assert job.values_of(other) == job.visible(other)


def test_lock_step_follows_the_arithmetic_that_the_manual_gives() -> None:
    job = Job(POLICIES["all"], "int8")
    for rank in range(WORKERS):
        job.pull(rank)
    values = torch.linspace(-1.0, 1.0, NUMEL)
    known = values.clone()
    for round in range(5):
        grads = [random_values(10 * round + rank) for rank in range(WORKERS)]
        seqs = [job.push(rank, [(0, NUMEL)], grads[rank]) for rank in range(WORKERS)]
        values = values - 0.1 * sum(grads, torch.zeros(NUMEL)) / 3
        assert torch.allclose(job.bucket.values, values, atol=1e-6)
        values = job.bucket.values.clone()
        payload = job.codec.encode(values - known, job.codec.new_state(NUMEL), round=round)
        job.codec.decode_add(payload, known)
        assert [job.values_of(rank) for rank in range(WORKERS)] == [known.tolist()] * WORKERS
        assert bytes(job.answers[1, seqs[1]][1]()[0]) == bytes(payload)


def test_readers_of_a_unit_get_the_same_bytes_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job, encoded = Job(POLICIES["all"], "int8", shared=False), []
    encode = type(job.codec).encode
    monkeypatch.setattr(type(job.codec), "encode", lambda *a, **k: encoded.append(a) or encode(*a, **k))
    for rank in range(WORKERS):
        job.pull(rank)
    seqs = [job.push(rank, [(0, NUMEL)], random_values(rank)) for rank in range(WORKERS)]
    frames = [job.answers[rank, seq][1]() for rank, seq in enumerate(seqs)]
    assert len(encoded) == 1
    assert frames[0][0] is frames[1][0] is frames[2][0]


def test_an_answer_given_again_is_the_same_bytes_and_is_not_added_again() -> None:
    job = Job(POLICIES["each"], "int8")
    job.pull(1)
    pulled, pushed = job.pull(1), job.push(1, [(0, NUMEL)], random_values(1))
    first = [bytes(frame) for seq in (pulled, pushed) for frame in job.answers[1, seq][1]()]
    held = job.values_of(1)
    for other in range(3):
        job.push(2, [(0, NUMEL)], random_values(other))
    assert [bytes(frame) for seq in (pulled, pushed) for frame in job.answers[1, seq][1]()] == first
    for seq in (pulled, pushed):
        job.use(1, seq)
    assert job.values_of(1) == held


def test_who_was_not_told_before_gets_the_known_values_as_they_are() -> None:
    job = Job(POLICIES["all"], "int8")
    job.pull(0)
    seqs = [job.push(rank, [(0, NUMEL)], random_values(rank)) for rank in range(WORKERS)]
    assert not job.told(1, seqs[1])[0].coded
    assert job.values_of(0) == job.values_of(1) == job.values_of(2) != job.bucket.values.tolist()
    seqs = [job.push(rank, [(0, NUMEL)], random_values(rank)) for rank in range(WORKERS)]
    assert job.told(1, seqs[1])[0].coded
    assert job.values_of(0) == job.values_of(1) == job.values_of(2)


@pytest.mark.parametrize("name", ["all", "each"])
def test_who_pulls_all_parts_of_a_slot_gets_differences_from_then_on(name: str) -> None:
    job = Job(POLICIES[name], "int8", shared=False)
    for parts, coded in (([(0, 5)], False), ([(0, 5), (5, 12)], True), ([(4, 12), (0, 7)], True)):
        job = Job(POLICIES[name], "int8", shared=False)
        for rank in range(WORKERS):
            for part in parts:
                assert not job.told(rank, job.pull(rank, *part))[0].coded
        seqs = [job.push(rank, [(0, NUMEL)], random_values(rank)) for rank in range(WORKERS)]
        assert [job.told(rank, seq)[0].coded for rank, seq in enumerate(seqs)] == [coded] * WORKERS
        assert [job.values_of(rank) for rank in range(WORKERS)] == [job.visible(rank) for rank in range(WORKERS)]


def test_a_part_that_is_pulled_between_leaves_the_next_answer_right() -> None:
    job = Job(POLICIES["each"], "int8", shared=False)
    job.pull(1)
    job.push(2, [(0, NUMEL)], random_values(2))
    job.pull(1, 3, 8)
    assert job.values_of(1)[3:8] == job.bucket.values[3:8].tolist()
    assert job.values_of(1) != job.bucket.values.tolist()
    assert not job.told(1, job.push(1, [(0, NUMEL)], random_values(1)))[0].coded
    assert job.values_of(1) == job.visible(1)
    assert job.told(1, job.push(1, [(0, NUMEL)], random_values(3)))[0].coded
    assert job.values_of(1) == job.visible(1)


def test_readers_of_joined_slots_go_on_with_differences() -> None:
    job = Job(POLICIES["all"], "powersgd", shared=False)
    for rank in range(WORKERS):
        job.pull(rank)
    for round in range(4):
        for spans in ([(0, 5), (5, 7)], [(0, NUMEL)]):
            seqs = [job.push(rank, spans, random_values(10 * round + rank)) for rank in range(WORKERS)]
            assert len(job.bucket.slots) == len(spans)
            assert all(one.coded for rank, seq in enumerate(seqs) for one in job.told(rank, seq))
            assert all(job.values_of(rank) == job.visible(rank) for rank in range(WORKERS))


def test_groups_are_told_apart() -> None:
    job = Job(POLICIES["groups"], "int8")
    for rank in range(WORKERS):
        job.pull(rank)
    start = job.values_of(0)
    job.push(2, [(0, NUMEL)], random_values(2))
    assert job.values_of(2) != start
    job.pull(0)
    assert job.values_of(0) == start
    for rank in (0, 1):
        job.push(rank, [(0, NUMEL)], random_values(rank))
    assert job.values_of(0) == job.values_of(1) != job.values_of(2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_reach_the_workers(bad: float) -> None:
    job = Job(POLICIES["all"], "int8")
    for rank in range(WORKERS):
        job.pull(rank)
    for rank in range(WORKERS):
        job.push(rank, [(0, NUMEL)], torch.full((NUMEL,), bad))
    for rank in range(WORKERS):
        assert not torch.tensor(job.values_of(rank)).isfinite().any()


def test_the_first_merged_gradients_replace_the_first_values_exactly() -> None:
    job = Job(POLICIES["all"], "int8", updater="assign")
    for rank in range(WORKERS):
        job.pull(rank)
    for round in range(2):
        for rank in range(WORKERS):
            job.push(rank, [(0, NUMEL)], random_values(10 * round + rank))
        assert (job.values_of(1) == job.bucket.values.tolist()) == (round == 0)


def test_unsent_values_go_with_the_state_and_come_back_bit_for_bit() -> None:
    jobs = [Job(POLICIES["all"], "2bit") for _ in range(2)]
    for rank in range(WORKERS):
        jobs[0].pull(rank)
    for rank in range(WORKERS):
        jobs[0].push(rank, [(0, NUMEL)], random_values(rank) * 20)
    whole = [m.Entry(0, 0, 0, NUMEL, 0)]
    state, frames = jobs[0].answers[1, jobs[0].ask(1, m.GetState("s", whole))]
    assert isinstance(state, m.StateIs)
    assert [item.name for item in state.items] == ["unsent", "unsent"]
    second = jobs[1]
    for start in (second.bucket.values, second.bucket.snapshots[0]):
        start.copy_(torch.tensor(jobs[0].values_of(1)))
    assert second.bucket.values.tolist() != jobs[0].bucket.values.tolist()
    second.ask(0, m.SetState("s", state.items), [bytes(frame) for frame in frames()])
    assert second.bucket.values.tolist() == jobs[0].bucket.values.tolist()
    second.pull(1)
    assert second.values_of(1) == jobs[0].values_of(1)


def test_unsent_values_of_another_kind_are_refused_and_change_nothing() -> None:
    job = Job(POLICIES["all"], "int8")
    before = job.bucket.values.tolist()
    item = m.StateItem(0, 0, 0, NUMEL, "unsent", "float32", [NUMEL])
    answer = job.answers[0, job.ask(0, m.SetState("s", [item]), [bytes(4 * NUMEL)])][0]
    assert isinstance(answer, m.Failed)
    assert "float64" in answer.text
    assert job.bucket.values.tolist() == before


def test_settings_that_do_not_fit_are_refused_by_the_server() -> None:
    job = Job(POLICIES["all"], "int8")
    other = msgspec.msgpack.encode({"type": "fp16"})
    answers = [
        job.answers[0, job.ask(0, m.SetCompression("s", other, "pull"))][0],
        job.answers[0, job.ask(0, m.Init("s", 1, "float16", [m.BucketSpec(0, 2, ["c"], [2], [[2]])]), [bytes(4)])][0],
        job.answers[0, job.ask(0, m.Push("s", [m.Entry(0, 0, 0, NUMEL, 1)], 1.0, b"", True, True, False), [b""])][0],
    ]
    kinds = [(answer.kind, answer.text) for answer in answers if isinstance(answer, m.Failed)]
    assert [kind for kind, _ in kinds] == ["ValueError", "TypeError", "ProtocolError"]
    assert "pull leg" in kinds[0][1]
    assert "float32" in kinds[1][1]
    assert isinstance(job.answers[0, job.compress()][0], m.Done)
    assert isinstance(job.answers[0, job.ask(0, m.SetCompression("s", other, "push"))][0], m.Done)
    assert isinstance(job.answers[0, job.ask(0, m.SetCompression("s", other, "both"))][0], m.Failed)


def test_the_optimizer_goes_on_where_it_stands_when_pulls_are_compressed() -> None:
    early, late = Job(POLICIES["all"], "int8", "adam"), Job(POLICIES["all"], "int8", "adam", compressed=False)
    memory = late.bucket.values
    for round in range(6):
        if round == 3:
            late.compress()
        for job in (early, late):
            for rank in range(WORKERS):
                job.push(rank, [(0, 5), (5, 7)], random_values(10 * round + rank))
    assert late.bucket.values.tolist() == early.bucket.values.tolist()
    assert late.visible(0) == memory.tolist() == late.values_of(0)


def test_the_pull_leg_is_not_set_under_unanswered_pushes() -> None:
    job = Job(POLICIES["all"], "int8", compressed=False)
    job.push(1, [(0, NUMEL)], random_values(0))
    answer = job.answers[0, job.compress()][0]
    assert isinstance(answer, m.Failed)
    assert "before the first push" in answer.text
    job.push(0, [(0, NUMEL)], random_values(1))
    job.push(2, [(0, NUMEL)], random_values(2))
    assert isinstance(job.answers[0, job.compress()][0], m.Done)
    job.push(1, [(0, NUMEL)], random_values(3))
    assert isinstance(job.answers[0, job.compress()][0], m.Done), "another worker says the same"


def test_the_codec_is_asked_only_when_somebody_can_use_the_difference() -> None:
    codec = compression.make("int8")
    assert codec is not None
    readers, known, values = Readers(), torch.zeros(4), torch.ones(4)
    assert readers.move(0, known, values, codec, []) is None
    assert known.tolist() == [1.0] * 4
    readers.tell(1, 0)
    assert readers.move(0, known, values + 1, codec, [1]) is not None
    assert readers.tell(1, 0)
    assert not readers.tell(2, 0)
