"""Row-sparse pushes and pulls at one server, in memory, against the store inside one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Settings
from paceline.consistency import Policy
from paceline.kvstore.inprocess import LocalStore
from paceline.layout.tensors import from_frame, to_frame
from paceline.server.members import Members
from paceline.server.requests import RequestHandler
from paceline.updaters import make_spec
from paceline.wire import messages as m

ROWS, WIDTH, WORKERS = 7, 3, 3
NUMEL = ROWS * WIDTH
POLICIES = {
    "all": Policy("all"),
    "each": Policy("each"),
    "groups": Policy("groups", ((0, 1), (2,))),
    "first": Policy("first", first=2),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"lr": 0.05},
    "adamw": {"lr": 0.05},
    "adagrad": {"lr": 0.1},
    "rmsprop": {"lr": 0.01, "momentum": 0.9},
    "rprop": {"lr": 0.01},  # has no lazy form
}


def start() -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, NUMEL).view(ROWS, WIDTH)


def gradient(rows: Sequence[int], seed: int) -> torch.Tensor:
    values = torch.randn(len(rows), WIDTH, generator=torch.Generator().manual_seed(seed))
    numbers = torch.tensor([list(rows)], dtype=torch.int64)
    return torch.sparse_coo_tensor(numbers, values, (ROWS, WIDTH), check_invariants=True).coalesce()


class OneServer:
    """A service with one key that has a bucket for itself, and another bucket of two keys."""

    def __init__(self, policy: Policy, name: str = "sgd", **options: Any) -> None:
        self.answers: dict[tuple[bytes, int], tuple[m.Reply, Sequence[Any]]] = {}
        members = Members([m.Member("worker", rank, 0, "h", "x", 1, "", b"t") for rank in range(WORKERS)], "", 0)
        self.service = RequestHandler(Settings(num_workers=WORKERS), self._keep, Mock(), members)
        self.seq = 0
        for rank in range(WORKERS):
            self.ask(rank, m.Claim("worker", rank, b"t"))
        groups = [list(group) for group in policy.groups]
        self.ask(0, m.OpenStore("s", policy.merge, groups, policy.first, -1, policy.weighting, False))
        spec = make_spec(name, **(options or OPTIMIZERS[name]))
        self.ask(0, m.SetUpdater("s", msgspec.msgpack.encode(spec)))
        alone, packed = (
            m.BucketSpec(0, NUMEL, ["e"], [NUMEL], [[ROWS, WIDTH]]),
            m.BucketSpec(1, 2, ["a", "b"], [1, 1], [[1], [1]]),
        )
        self.ask(0, m.Init("s", 0, "float32", [alone, packed]), [to_frame(start()), to_frame(torch.zeros(2))])

    def _keep(self, peer: bytes, seq: int, body: m.Reply, frames: Any, urgency: int | None) -> None:
        assert (peer, seq) not in self.answers, "answered twice"
        self.answers[peer, seq] = body, [bytes(frame) for frame in frames()]

    def ask(self, rank: int, body: m.Request, frames: Sequence[Any] = ()) -> m.Reply | None:
        self.seq += 1
        self.service.handle(b"worker-%d" % rank, self.seq, body, frames)
        return self.answers.get((b"worker-%d" % rank, self.seq), (None, ()))[0]

    def push(self, rank: int, round: int, grad: torch.Tensor) -> m.Reply | None:
        """Push rows, or a dense gradient."""
        entries = [m.Entry(0, 0, 0, NUMEL, round)]
        if not grad.is_sparse:
            return self.ask(rank, m.Push("s", entries, 1.0, b"", False, False, False), [bytearray(to_frame(grad))])
        frames = [bytearray(to_frame(grad.indices()[0])), bytearray(to_frame(grad.values()))]
        return self.ask(rank, m.Push("s", entries, 1.0, b"", False, False, False, True), frames)

    def pull(self, rank: int, rows: Sequence[int]) -> torch.Tensor:
        numbers = bytearray(to_frame(torch.tensor(rows, dtype=torch.int64)))
        answer = self.ask(rank, m.PullRows("s", m.Entry(0, 0, 0, NUMEL, 0)), [numbers])
        assert isinstance(answer, m.Values)
        _, frames = self.answers[b"worker-%d" % rank, self.seq]
        return from_frame(frames[0], torch.float32, len(rows) * WIDTH).view(-1, WIDTH)

    @property
    def values(self) -> torch.Tensor:
        return self.service.stores["s"].own.get(0, 0).values.view(ROWS, WIDTH).clone()


def local(name: str) -> LocalStore:
    store = LocalStore()
    store.set_optimizer(name, **OPTIMIZERS[name])
    store.init("e", start().to_sparse(1))
    return store


def value_of(store: LocalStore) -> torch.Tensor:
    out = torch.zeros(ROWS, WIDTH)
    store.pull("e", out)
    return out


some_rows = st.lists(st.sets(st.integers(0, ROWS - 1)), min_size=WORKERS, max_size=WORKERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=8, deadline=None)
@given(rounds=st.lists(some_rows, min_size=1, max_size=4), data=st.data())
def test_workers_in_lock_step_update_rows_as_the_devices_of_one_process_do(
    name: str, rounds: list[list[set[int]]], data: st.DataObject
) -> None:
    server, reference = OneServer(POLICIES["all"], name), local(name)
    for number, touched in enumerate(rounds, 1):
        grads = [gradient(sorted(rows), 10 * number + rank) for rank, rows in enumerate(touched)]
        for rank in data.draw(st.permutations(range(WORKERS))):
            server.push(rank, number, grads[rank])
        reference.push("e", grads)
        torch.testing.assert_close(server.values, value_of(reference), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pushes_that_are_applied_one_by_one_touch_only_their_rows(name: str) -> None:
    server, reference = OneServer(POLICIES["each"], name), local(name)
    for number in range(1, 4):
        for rank in range(WORKERS):
            before, rows = server.values, sorted({rank, (rank + number) % ROWS})
            assert isinstance(server.push(rank, number, gradient(rows, number)), m.Values)
            reference.push("e", gradient(rows, number))
            others = [row for row in range(ROWS) if row not in rows]
            assert name == "rprop" or torch.equal(server.values[others], before[others])
            torch.testing.assert_close(server.values, value_of(reference), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_order_of_arrival_does_not_change_a_bit(order: tuple[int, ...]) -> None:
    grads = [gradient(range(ROWS), rank) * 10.0 ** (3 * rank) for rank in range(WORKERS)]
    server, expected = OneServer(POLICIES["all"]), OneServer(POLICIES["all"])
    for rank in range(WORKERS):
        expected.push(rank, 1, grads[rank].coalesce())
        server.push(order[rank], 1, grads[order[rank]].coalesce())
    assert torch.equal(server.values, expected.values)


@pytest.mark.parametrize("policy", POLICIES)
def test_repeated_push_is_acknowledged_and_changes_nothing(policy: str) -> None:
    once, twice = OneServer(POLICIES[policy]), OneServer(POLICIES[policy])
    for number in (1, 2):
        for rank in range(WORKERS):
            once.push(rank, number, gradient([rank, 5], number))
            twice.push(rank, number, gradient([rank, 5], number))
            twice.push(rank, number, gradient([rank, 5], number))
    assert torch.equal(once.values, twice.values)
    assert not torch.equal(once.values, start())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_rows_and_dense_values_of_one_round_add_up(order: tuple[int, ...]) -> None:
    server = OneServer(POLICIES["all"], "sgd", lr=1.0)
    grads = [gradient([1, 2], 0), gradient(range(ROWS), 1).to_dense(), gradient([2, 6], 2)]
    for rank in order:
        server.push(rank, 1, grads[rank])
    expected = start() - sum(grad.to_dense() for grad in grads)
    torch.testing.assert_close(server.values, expected)


def test_pull_of_rows_brings_those_rows() -> None:
    server = OneServer(POLICIES["each"])
    server.push(1, 1, gradient([4], 0))
    assert torch.equal(server.pull(2, [0, 4, 6]), server.values[[0, 4, 6]])
    assert server.pull(2, []).shape == (0, WIDTH)


@pytest.mark.parametrize(
    ("change", "numbers", "words"),
    [
        ({}, [3, 1], "must ascend"),
        ({}, [1, 1], "must ascend"),
        ({}, [1, 7], "less than 7"),
        ({}, [-1, 1], "0 or more"),
        ({}, [1], "a frame of 24 bytes for 3 elements"),
        ({"coded": True}, [1, 3], "travel as they are"),
        ({"shared": True}, [1, 3], "travel as they are"),
        ({"entries": [m.Entry(0, 0, 0, 6, 1)]}, [1, 3], "entry of the whole bucket"),
        ({"entries": [m.Entry(0, 1, 0, 2, 1)]}, [1, 3], "a bucket for itself"),
    ],
)
def test_rows_that_make_no_sense_are_refused_and_change_nothing(
    change: dict[str, Any], numbers: list[int], words: str
) -> None:
    server = OneServer(POLICIES["each"])
    push = m.Push("s", [m.Entry(0, 0, 0, NUMEL, 1)], 1.0, b"", False, False, False, True)
    frames = [bytearray(to_frame(torch.tensor(numbers))), bytearray(to_frame(torch.ones(2, WIDTH)))]
    answer = server.ask(0, msgspec.structs.replace(push, **change), frames)
    assert isinstance(answer, m.Failed)
    assert words in answer.text
    assert torch.equal(server.values, start())
    assert isinstance(server.push(0, 1, gradient([1], 0)), m.Values), "the round is still to come"


def test_cut_of_a_bucket_keeps_rows_that_were_pushed() -> None:
    """Who pushes a part of the key has it cut; rows that wait for the others are cut with it."""
    server = OneServer(POLICIES["all"], "sgd", lr=1.0)
    server.push(0, 1, gradient([1, 6], 0))
    ones = torch.ones(NUMEL)
    for rank in (1, 2):
        entries = [m.Entry(0, 0, 0, 10, 1), m.Entry(0, 0, 10, NUMEL - 10, 1)]
        frames = [bytearray(to_frame(ones[:10])), bytearray(to_frame(ones[10:]))]
        server.ask(rank, m.Push("s", entries, 1.0, b"", False, False, False), frames)
    torch.testing.assert_close(server.values, start() - gradient([1, 6], 0).to_dense() - 2)
