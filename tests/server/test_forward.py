"""Local merge among services in memory: any order of delivery gives the values that pushing directly gives."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Settings
from paceline.consistency import Policy
from paceline.layout.local_merge import LocalMerge
from paceline.layout.tensors import dtype_name, from_frame, to_frame
from paceline.server.forward import ForwardStore
from paceline.server.members import Members
from paceline.server.requests import RequestHandler
from paceline.updaters import StepOptions, make_spec
from paceline.wire import messages as m
from paceline.worker.block import Rounds

NUMEL = 10
#: Host of every worker and server.
WORKERS, SERVERS = "aabbaa", "ab"
BucketRange = tuple[int, int, int]  # bucket, start, length
WHOLE: list[BucketRange] = [(0, 0, NUMEL), (1, 0, NUMEL)]
HALVES: list[BucketRange] = [(0, 0, 4), (0, 4, NUMEL - 4), (1, 0, 4), (1, 4, NUMEL - 4)]
ALL, GROUPS = Policy("all"), Policy("groups", ((0, 1, 2), (3, 4, 5)), weighting="inverse")
BOUNDED = Policy("groups", ((0, 1), (2, 3, 4), (5,)), bound=0)


def gradient(worker: int, part: BucketRange, round: int) -> torch.Tensor:
    """Values whose sums are rounded, so that another order gives another result."""
    whole = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * part[0] + 100 * round + worker))
    return whole[part[1] : part[1] + part[2]] * 10.0**worker


class Cluster:
    """Services and the messages that are on their way between them, in order on every connection.

    What is pushed is read when it is delivered, as late as a transport without copies may.
    """

    def __init__(
        self, policy: Policy, mean: bool, local_merge: bool, chance: random.Random, dtype: torch.dtype = torch.float32
    ) -> None:
        self.chance, self.policy, self.dtype = chance, policy, dtype
        self.connections: dict[tuple[str, str], deque[Callable[[], None]]] = {}
        self.answers: dict[tuple[int, int, int], tuple[m.Reply, list[bytearray]]] = {}
        self.asked: dict[tuple[bytes, int], tuple[int, Any]] = {}
        self.forwarded: list[m.Request] = []
        self.ask_owner: list[Callable[..., None]] = []
        units = policy.unit_of(len(WORKERS)) if local_merge else range(len(WORKERS))
        self.local_merge = LocalMerge(WORKERS, SERVERS, units)
        self.services = [self.new_service(rank) for rank in range(len(SERVERS))]
        self.seq = 0
        groups = [list(group) for group in policy.groups]
        bound = -1 if policy.bound is None else policy.bound
        opened = m.OpenStore("s", policy.merge, groups, 0, bound, policy.weighting, mean, local_merge)
        spec = make_spec("sgd", lr=0.1, momentum=0.9, multi_precision=dtype != torch.float32)
        for server in range(len(SERVERS)):
            for other in range(len(SERVERS)):
                self.services[server].handle(b"server-%d" % other, 1, m.Claim("server", other, b"s"), ())
            for worker in range(len(WORKERS)):
                self.now(worker, server, m.Claim("worker", worker, b"t"))
            self.now(0, server, opened)
            self.now(0, server, m.SetUpdater("s", msgspec.msgpack.encode(spec)))
            bucket = m.BucketSpec(server, NUMEL, ["a", "b"], [4, NUMEL - 4], [[4], [NUMEL - 4]])
            start = torch.linspace(-1.0, 1.0, NUMEL).to(dtype)
            self.now(0, server, m.Init("s", 0, dtype_name(dtype), [bucket]), [to_frame(start)])
        for server in range(len(SERVERS)):
            for worker in range(len(WORKERS)):
                via = self.local_merge.via(worker, server)
                if via != server:
                    asked = m.ForwardBuckets("s", 0, dtype_name(dtype), [m.ForwardedBucket(server, NUMEL, server)])
                    assert isinstance(self.now(worker, via, asked), m.ValuesAt)

        # Servers forget the store when the last worker has left it.
        self.hosted = [service.stores["s"] for service in self.services]

    def new_service(self, rank: int) -> RequestHandler:
        def answer(
            peer: bytes, seq: int, body: m.Reply, frames: Callable[[], Sequence[Any]], urgency: int | None
        ) -> None:
            role, _, number = peer.decode().partition("-")
            # Who waits at a barrier may get newer values than it was answered; it reads anew after that. Not here.
            copies = frozen(frames())
            deliver = partial(self.answered, rank, role, int(number), seq, body, copies)
            self.send(f"server {rank}", f"{role} {number}", deliver)

        def ask(owner: int, body: m.Request, frames: Sequence[Any], on_answer: Any) -> None:
            self.seq += 1
            seq, peer = self.seq, b"server-%d" % rank
            self.asked[peer, seq] = owner, on_answer
            self.forwarded.append(body)
            self.send(
                f"server {rank}", f"server {owner}",
                lambda: self.services[owner].handle(peer, seq, body, frozen(frames)),
            )  # fmt: skip

        self.ask_owner.append(ask)
        members = [m.Member("worker", r, 0, "h", host, 1, "", b"t") for r, host in enumerate(WORKERS)]
        members += [m.Member("server", r, 0, "h", host, 1, "", b"s") for r, host in enumerate(SERVERS)]
        return RequestHandler(Settings(num_workers=len(WORKERS)), answer, ask, Members(members, SERVERS[rank], rank))

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        self.connections.setdefault((source, target), deque()).append(deliver)

    def answered(self, server: int, role: str, number: int, seq: int, body: m.Reply, frames: list[bytearray]) -> None:
        if role == "worker":
            assert (number, server, seq) not in self.answers, "answered twice"
            self.answers[number, server, seq] = body, frames
        elif seq > 1:
            owner, on_answer = self.asked.pop((b"server-%d" % number, seq))
            assert owner == server
            on_answer(body, frames)

    def ask(self, worker: int, server: int, body: m.Request, frames: Sequence[Any] = ()) -> tuple[int, int, int]:
        self.seq += 1
        seq = self.seq
        self.send(
            f"worker {worker}", f"server {server}",
            lambda: self.services[server].handle(b"worker-%d" % worker, seq, body, frozen(frames)),
        )  # fmt: skip
        return worker, server, seq

    def now(self, worker: int, server: int, body: m.Request, frames: Sequence[Any] = ()) -> m.Reply:
        """Ask, and deliver all there is."""
        call = self.ask(worker, server, body, frames)
        while self.deliver():
            pass
        return self.answers[call][0]

    def deliver(self) -> bool:
        """Deliver one message of a random connection; False when there is none."""
        busy = [one for one in sorted(self.connections) if self.connections[one]]
        if busy:
            self.connections[self.chance.choice(busy)].popleft()()
        return bool(busy)

    def values(self, server: int) -> torch.Tensor:
        return self.hosted[server].own.get(0, server).values


def frozen(frames: Sequence[Any]) -> list[bytearray]:
    return [bytearray(memoryview(frame)) for frame in frames]


Program = Iterator[Callable[[], bool]]  # yields what it waits for


class Worker:
    """A worker's program: some rounds before every barrier, then it leaves. It waits as workers do, and for no more."""

    def __init__(
        self, cluster: Cluster, rank: int, segments: Sequence[Sequence[list[BucketRange]]], samples: float
    ) -> None:
        self.cluster, self.rank, self.samples = cluster, rank, samples
        self.rounds = [Rounds(NUMEL) for _ in SERVERS]
        self.pushed: list[tuple[BucketRange, tuple[int, int, int]]] = []
        self.seen: dict[int, torch.Tensor] = {
            server: torch.full((NUMEL,), float("nan")) for server in range(len(SERVERS))
        }
        self.at_barrier = 0
        self.program = self.run(segments)
        self.waits_for: Callable[[], bool] | None = lambda: True

    def run(self, segments: Sequence[Sequence[list[BucketRange]]]) -> Program:
        for number, segment in enumerate(segments, 1):
            for ranges in segment:
                for part in ranges:
                    yield lambda part=part: self.is_free(part)
                    self.push(part)
            yield from self.tell_all(m.Pause("s"))
            self.at_barrier = number
            yield lambda number=number: all(one.at_barrier >= number for one in workers_of[id(self.cluster)])
        yield lambda: all(self.is_free(part) for part in WHOLE)
        yield from self.tell_all(m.Leave("s"))

    def tell_all(self, body: m.Pause | m.Leave) -> Program:
        calls = [self.cluster.ask(self.rank, server, body) for server in range(len(SERVERS))]
        yield lambda: all(call in self.cluster.answers for call in calls)
        assert all(self.cluster.answers[call][0] == m.Done() for call in calls)

    def is_free(self, part: BucketRange) -> bool:
        return all(
            call in self.cluster.answers
            for (bucket, start, length), call in self.pushed
            if bucket == part[0] and start < part[1] + part[2] and part[1] < start + length
        )

    def push(self, part: BucketRange) -> None:
        self.read()
        bucket, start, length = part
        pieces = self.rounds[bucket].next(start, length)
        entries = [m.Entry(0, bucket, *piece) for piece in pieces]
        grads = [gradient(self.rank, (bucket, first, count), round) for first, count, round in pieces]
        frames = [to_frame(grad.to(self.cluster.dtype)) for grad in grads]
        options = msgspec.msgpack.encode(StepOptions([{"lr": 0.05, "momentum": 0.9}]))
        body = m.Push("s", entries, self.samples, options, False, True, False)
        call = self.cluster.ask(self.rank, self.cluster.local_merge.via(self.rank, bucket), body, frames)
        self.pushed.append((part, call))

    def read(self) -> None:
        """Take the values that came with answers, as they are cut."""
        for (bucket, start, _), call in self.pushed:
            if call in self.cluster.answers:
                body, frames = self.cluster.answers[call]
                assert isinstance(body, m.Values), body
                dtype = self.cluster.dtype
                values = torch.cat([from_frame(frame, dtype, len(frame) // dtype.itemsize) for frame in frames])
                self.seen[bucket][start : start + values.numel()] = values
        self.pushed = [one for one in self.pushed if one[1] not in self.cluster.answers]

    def step(self) -> bool:
        """Go on if possible; False when the program is over or waits."""
        if self.waits_for is None or not self.waits_for():
            return False
        self.waits_for = next(self.program, None)
        return True


workers_of: dict[int, list[Worker]] = {}


def train(
    cluster: Cluster, segments: Sequence[Sequence[Sequence[list[BucketRange]]]], samples: Sequence[float]
) -> list[Worker]:
    """Run all workers to their end; fails when they wait for ever."""
    workers = [Worker(cluster, rank, segments[rank], samples[rank]) for rank in range(len(WORKERS))]
    workers_of[id(cluster)] = workers
    while any(worker.waits_for is not None for worker in workers):
        moved = [worker for worker in cluster.chance.sample(workers, len(workers)) if worker.step()]
        assert cluster.deliver() or moved, "they wait for ever"
    for worker in workers:
        worker.read()
    del workers_of[id(cluster)]
    return workers


# With more rounds, workers that push other parts would wait for each other for ever, with local merge or without.
rounds_of_a_segment = st.lists(st.sampled_from([WHOLE, HALVES, WHOLE[:1]]), max_size=3)
programs = st.integers(1, 3).flatmap(
    lambda barriers: st.lists(
        st.lists(rounds_of_a_segment, min_size=barriers, max_size=barriers),
        min_size=len(WORKERS), max_size=len(WORKERS),
    )
)  # fmt: skip
counts = st.lists(st.sampled_from([0.0, 1.0, 16.0, 48.0]), min_size=len(WORKERS), max_size=len(WORKERS))


def outcome(cluster: Cluster) -> list[torch.Tensor]:
    """Return the values on all servers, and how many samples of every worker have reached them."""
    stores = [hosted.own for hosted in cluster.hosted]
    masses = [[store.stats.data_mass[rank] for rank in range(len(WORKERS))] for store in stores]
    return [*(cluster.values(server) for server in range(len(SERVERS))), torch.tensor(masses)]


@settings(max_examples=30, deadline=None)
@given(segments=programs, samples=counts, mean=st.booleans(), seed=st.integers(0, 2**32))
def test_values_are_the_same_bit_for_bit_with_and_without_local_merge(
    segments: list[list[list[list[BucketRange]]]], samples: list[float], mean: bool, seed: int
) -> None:
    outcomes = []
    for local_merge in (True, False):
        cluster = Cluster(ALL, mean, local_merge, random.Random(seed))
        train(cluster, segments, samples)
        outcomes.append(outcome(cluster))
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_sums_of_small_types_are_rounded_once_more_on_the_way() -> None:
    found = []
    for local_merge in (True, False):
        cluster = Cluster(ALL, True, local_merge, random.Random(0), torch.bfloat16)
        train(cluster, [[[WHOLE] * 3]] * len(WORKERS), [1.0] * len(WORKERS))
        found.append(cluster.values(0))
    largest = found[1].abs().max().item()
    torch.testing.assert_close(*found, rtol=0.0, atol=largest * 2 * torch.finfo(torch.bfloat16).eps)


@settings(max_examples=20, deadline=None)
@given(
    rounds=st.lists(st.sampled_from([WHOLE, HALVES]), min_size=len(WORKERS), max_size=len(WORKERS)),
    seed=st.integers(0, 2**32),
)
def test_workers_in_lock_step_all_get_the_values_of_the_servers(rounds: list[list[BucketRange]], seed: int) -> None:
    cluster = Cluster(ALL, True, True, random.Random(seed))
    workers = train(cluster, [[[mine] * 3] for mine in rounds], [16.0, 48.0, 1.0, 16.0, 16.0, 2.0])
    for worker in workers:
        for server in range(len(SERVERS)):
            assert torch.equal(worker.seen[server], cluster.values(server))
    sums = [body for body in cluster.forwarded if isinstance(body, m.PushSum)]
    assert {share.worker for body in sums for share in body.shares} == set(range(len(WORKERS)))
    assert all(len(body.shares) == len(cluster.local_merge.local_unit(body.shares[0].worker)) for body in sums)


@pytest.mark.parametrize("policy", [GROUPS, BOUNDED], ids=["groups", "bounded groups"])
@settings(max_examples=15, deadline=None)
@given(segments=programs, samples=counts, seed=st.integers(0, 2**32))
def test_groups_with_local_merge_wait_for_nobody_for_ever_and_every_push_is_taken(
    policy: Policy, segments: list[list[list[list[BucketRange]]]], samples: list[float], seed: int
) -> None:
    cluster = Cluster(policy, True, True, random.Random(seed))
    workers = train(cluster, segments, samples)
    for server in range(len(SERVERS)):
        for slot in cluster.hosted[server].own.get(0, server).slots:
            for worker in workers:
                rounds = {round - 1 for _, _, round in worker.rounds[server].next(slot.span.start, slot.span.length)}
                assert rounds == {slot.rule.pushed[worker.rank]} == {slot.rule.answered[worker.rank]}


# ---- by example ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Cluster:
    """Workers 0, 1, 4 and 5 push bucket 1 through server 0."""
    return Cluster(ALL, False, True, random.Random(0))


@pytest.mark.parametrize("policy", [Policy("each"), Policy("first", first=2, age=0)], ids=["each", "first"])
def test_merge_that_may_drop_single_pushes_is_not_forwarded(policy: Policy, cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="sums nothing over workers"):
        ForwardStore("s", policy, False, cluster.local_merge, 0, False, lambda *request: None)


def push(cluster: Cluster, worker: int, round: int = 1, **changes: Any) -> tuple[int, int, int]:
    """Push bucket 1 to server 0."""
    fields = {"samples": 1.0, "options": b"", "coded": False, "want": True, "shared": False, "rows": False} | changes
    body = m.Push("s", [m.Entry(0, 1, 0, NUMEL, round)], **fields)
    return cluster.ask(worker, 0, body, [to_frame(torch.ones(NUMEL))])


def settle(cluster: Cluster, *, until: Callable[[], bool] = lambda: False) -> None:
    while not until() and cluster.deliver():
        pass


def refusal(cluster: Cluster, call: tuple[int, int, int]) -> str:
    settle(cluster)
    body = cluster.answers[call][0]
    assert isinstance(body, m.Failed)
    return f"{body.kind}: {body.text}"


def of_server(cluster: Cluster, body: m.Request, frames: Sequence[Any] = ()) -> str:
    """Let server 0 ask server 1; return the refusal or an empty text."""
    before = repr([slot.rule.__dict__ for slot in cluster.hosted[1].own.get(0, 1).slots])
    found: list[m.Body] = []
    cluster.ask_owner[0](1, body, frames, lambda body, frames: found.append(body))
    settle(cluster, until=lambda: bool(found))
    [answer] = found
    assert isinstance(answer, m.Failed)
    after = repr([slot.rule.__dict__ for slot in cluster.hosted[1].own.get(0, 1).slots])
    assert before == after, "a refused message changed something"
    return answer.text


def a_sum(**changes: Any) -> m.PushSum:
    shares = [m.Share(0, 1.0, [1]), m.Share(1, 1.0, [1])]
    fields = {"entries": [m.Entry(0, 1, 0, NUMEL, 0)], "shares": shares, "unit": 1.0, "options": b""} | changes
    return m.PushSum("s", **fields)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            a_sum(shares=[m.Share(0, 1.0, [1]), m.Share(2, 1.0, [1])]),
            "does not forward for worker 2",
        ),
        (a_sum(shares=[m.Share(9, 1.0, [1])]), "does not forward for worker 9"),
        (m.OnBehalf(3, m.Leave("s")), "does not forward for worker 3"),
        (m.Leave("s"), "from another server"),
        (a_sum(shares=[]), "without one round per entry"),
        (a_sum(shares=[m.Share(0, 1.0, [])]), "without one round per entry"),
        (a_sum(shares=[m.Share(0, 1.0, [1]), m.Share(0, 1.0, [1])]), "twice"),
        (a_sum(shares=[m.Share(0, 1.0, [2])]), "after round 0"),
        (a_sum(entries=[m.Entry(0, 1, 2, 3, 0)], shares=[m.Share(0, 1.0, [2])]), "after round 0"),
        (a_sum(unit=0.0), "unit is 0.0"),
        (a_sum(unit=float("nan")), "unit is nan"),
        (a_sum(entries=[m.Entry(0, 1, 1, NUMEL, 0)]), "of a bucket of"),
        (a_sum(entries=[m.Entry(0, 0, 0, NUMEL, 0)]), "not initialised here"),
    ],
)
def test_what_a_server_says_is_refused_where_it_makes_no_sense(cluster: Cluster, body: m.Request, why: str) -> None:
    assert why in of_server(cluster, body, [to_frame(torch.ones(NUMEL))])


@pytest.mark.parametrize(("sizes", "why"), [([], "1 entries with 0 frames"), ([NUMEL - 1], "a frame of 36 bytes")])
def test_a_sum_with_frames_that_do_not_fit_is_refused(cluster: Cluster, sizes: list[int], why: str) -> None:
    assert why in of_server(cluster, a_sum(), [to_frame(torch.ones(size)) for size in sizes])


def test_workers_cannot_push_sums(cluster: Cluster) -> None:
    assert "a server does not take PushSum" in refusal(cluster, cluster.ask(0, 1, a_sum()))


@pytest.mark.parametrize(
    ("worker", "buckets", "why"),
    [
        (0, [], "does not push block 1 through server 0"),
        (0, [m.ForwardedBucket(0, 3, 0)], "does not push block 1 through server 0"),
        (2, [m.ForwardedBucket(0, 3, 1)], "does not push block 1 through server 0"),
        (0, [m.ForwardedBucket(0, 2**40, 1)], "does not fit into a frame"),
        (0, [m.ForwardedBucket(0, 3, 1), m.ForwardedBucket(0, 3, 1)], "listed twice"),
    ],
)
def test_only_what_is_pushed_through_a_server_is_taken(
    cluster: Cluster, worker: int, buckets: list[m.ForwardedBucket], why: str
) -> None:
    assert why in refusal(cluster, cluster.ask(worker, 0, m.ForwardBuckets("s", 1, "float32", buckets)))


def test_workers_that_place_a_block_differently_are_told(cluster: Cluster) -> None:
    other = m.ForwardBuckets("s", 0, "float32", [m.ForwardedBucket(1, NUMEL + 1, 1)])
    assert "KeyMismatchError: worker 1 places block 0 of 's' differently" in refusal(cluster, cluster.ask(1, 0, other))


def test_a_server_without_local_merge_forwards_nothing() -> None:
    cluster = Cluster(ALL, False, False, random.Random(0))
    asked = m.ForwardBuckets("s", 0, "float32", [m.ForwardedBucket(1, NUMEL, 1)])
    assert "forwards nothing" in refusal(cluster, cluster.ask(0, 0, asked))


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"rows": True, "want": False}, "rows go to their server"), ({"coded": True}, "no compression")],
)
def test_rows_and_encoded_values_are_not_forwarded(cluster: Cluster, changes: dict[str, Any], why: str) -> None:
    assert why in refusal(cluster, push(cluster, 0, **changes))


def test_a_push_before_the_last_was_answered_is_refused_though_the_sum_is_complete(cluster: Cluster) -> None:
    calls = [push(cluster, worker) for worker in (0, 1, 4, 5)]
    settle(cluster, until=lambda: bool(cluster.forwarded))
    assert "round 2 of worker 0 came before round 1 was answered" in refusal(cluster, push(cluster, 0, 2))
    assert not any(call in cluster.answers for call in calls)


def test_a_push_that_is_asked_again_counts_once_and_the_last_is_answered(cluster: Cluster) -> None:
    for worker in (0, 1, 4, 5):
        push(cluster, worker)
    settle(cluster)
    first, again = push(cluster, 0), push(cluster, 0)
    for worker in (2, 3):
        cluster.ask(worker, 1, m.Push("s", [m.Entry(0, 1, 0, NUMEL, 1)], 1.0, b"", False, True, False),
                    [to_frame(torch.ones(NUMEL))])  # fmt: skip
    settle(cluster)
    assert first not in cluster.answers, "who asks again through another connection has lost the first"
    once_more = push(cluster, 0)
    settle(cluster)
    for call in (again, once_more):
        body, frames = cluster.answers[call]
        assert isinstance(body, m.Values)
        values = from_frame(frames[0], torch.float32, NUMEL)
        torch.testing.assert_close(values, torch.linspace(-1.0, 1.0, NUMEL) - 0.1 * 6.0)
    assert cluster.hosted[1].own.stats.updates == 1


def test_requests_that_are_refused_or_only_ask_cut_nothing(cluster: Cluster) -> None:
    forward = cluster.hosted[0].forward
    assert forward is not None
    push(cluster, 0)
    part = m.Entry(0, 1, 2, 3, 0)
    cluster.ask(0, 0, m.AskMissing("s", part))
    cluster.ask(0, 0, m.Push("s", [part], 1.0, b"", False, True, False), [bytes(12)])
    settle(cluster)
    assert [(slot.span.start, slot.span.stop) for slot in forward.get(0, 1).slots] == [(0, NUMEL)]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (m.Failed("RemoteError", "the update failed"), "RemoteError: server 1: the update failed"),
        (m.Values(), "ProtocolError: server 1 answered 1 sums with 0 frames of values"),
    ],
)
def test_what_goes_wrong_at_the_owner_reaches_all_behind_a_sum(cluster: Cluster, answer: m.Reply, why: str) -> None:
    calls = [push(cluster, worker) for worker in (0, 1, 4, 5)]
    settle(cluster, until=lambda: bool(cluster.asked))
    [(_, on_answer)] = cluster.asked.values()
    on_answer(answer, [])
    for call in calls:
        assert why in refusal(cluster, call)


def test_who_is_missing_is_known_near_and_asked_for_far(cluster: Cluster) -> None:
    def missing() -> list[int]:
        settle(cluster)
        answer = cluster.now(0, 0, m.AskMissing("s", m.Entry(0, 1, 0, NUMEL, 1)))
        assert isinstance(answer, m.Missing)
        assert "what happened to" in answer.story
        assert "worker 0 pushed round 1" in answer.story
        return answer.workers

    for worker in (0, 4, 5):
        push(cluster, worker)
    assert missing() == [1]
    push(cluster, 1)
    assert missing() == [2, 3]
    cluster.now(2, 1, m.Leave("s"))
    assert missing() == [3]
