"""Pushes of rows whose answers bring rows: the merged ones of a round, or those of a value that changed."""

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
from paceline.layout.tensors import dtype_name, from_frame, to_frame
from paceline.server.members import Members
from paceline.server.requests import RequestHandler
from paceline.server.rows import ChangedRows
from paceline.updaters import make_spec
from paceline.wire import messages as m

ROWS, WIDTH, WORKERS = 7, 3, 3
POLICIES = {
    "all": Policy("all"),
    "each": Policy("each"),
    "groups": Policy("groups", ((0, 1), (2,))),
    "first": Policy("first", first=2),
}


def start() -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, ROWS * WIDTH).view(ROWS, WIDTH)


def gradient(rows: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(len(rows), WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
    numbers = torch.tensor([list(rows)], dtype=torch.int64)
    return torch.sparse_coo_tensor(numbers, values, (ROWS, WIDTH), check_invariants=True).coalesce()


def gradient_of(rows: torch.Tensor, height: int) -> torch.Tensor:
    ones = torch.ones(rows.numel(), 1)
    return torch.sparse_coo_tensor(rows[None], ones, (height, 1), is_coalesced=True, check_invariants=False)


class OneServer:
    """A service with one key whose pushes are answered with rows."""

    def __init__(
        self,
        answers: str,
        policy: Policy = POLICIES["all"],
        optimizer: str = "sgd",
        mean: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.answers: dict[tuple[bytes, int], tuple[m.Reply, Sequence[Any]]] = {}
        members = Members([m.Member("worker", rank, 0, "h", "x", 1, "", b"t") for rank in range(WORKERS)], "", 0)
        self.service = RequestHandler(Settings(num_workers=WORKERS), self._keep, Mock(), members)
        self.seq, self.dtype = 0, dtype
        self.numel = 1 if answers == "merged" else ROWS * WIDTH
        for rank in range(WORKERS):
            self.ask(rank, m.Claim("worker", rank, b"t"))
        groups = [list(group) for group in policy.groups]
        self.ask(0, m.OpenStore("s", policy.merge, groups, policy.first, -1, policy.weighting, mean))
        self.ask(0, m.SetUpdater("s", msgspec.msgpack.encode(make_spec(optimizer, lr=0.5))))
        bucket = m.BucketSpec(0, self.numel, ["e"], [self.numel], [[ROWS, WIDTH]])
        value = torch.zeros(1) if answers == "merged" else start()
        self.made = self.ask(0, m.Init("s", 0, dtype_name(dtype), [bucket], answers), [to_frame(value.to(dtype))])

    def _keep(self, peer: bytes, seq: int, body: m.Reply, frames: Any, urgency: int | None) -> None:
        assert (peer, seq) not in self.answers, "answered twice"
        self.answers[peer, seq] = body, [bytes(frame) for frame in frames()]

    def ask(self, rank: int, body: m.Request, frames: Sequence[Any] = ()) -> m.Reply | None:
        self.seq += 1
        self.service.handle(b"worker-%d" % rank, self.seq, body, frames)
        return self.answers.get((b"worker-%d" % rank, self.seq), (None, ()))[0]

    def push(self, rank: int, round: int, grad: torch.Tensor | None, samples: float = 1.0, skip: bool = False) -> int:
        """Push rows, nothing, or a dense gradient; returns the number of the request."""
        by_rows = grad is None or grad.is_sparse
        entries, absent = [m.Entry(0, 0, 0, self.numel, round)], [m.Span(0, 0, 0, self.numel)] * (grad is None)
        push = m.Push("s", entries, samples, b"", False, by_rows, False, by_rows, absent, skip)
        parts = (
            [torch.empty(0)] * 2 if grad is None else [grad.indices()[0], grad.values()] if grad.is_sparse else [grad]
        )
        self.ask(rank, push, [] if skip else [bytearray(to_frame(part)) for part in parts])
        return self.seq

    def news(self, rank: int) -> int:
        """Ask for the rows that changed; returns the number of the request."""
        self.ask(rank, m.PullRows("s", m.Entry(0, 0, 0, self.numel, 0)))
        return self.seq

    def frames(self, rank: int, seq: int) -> Sequence[bytes]:
        """Return the frames of an answer."""
        body, frames = self.answers[b"worker-%d" % rank, seq]
        assert isinstance(body, m.Values), body
        return frames

    def rows(self, rank: int, seq: int) -> dict[int, torch.Tensor] | None:
        """Return the rows that an answer brought, by their number."""
        frames = self.frames(rank, seq)
        if not frames:
            return None
        numbers = from_frame(frames[0], torch.int64, len(frames[0]) // 8)
        values = from_frame(frames[1], self.dtype, numbers.numel() * WIDTH).view(-1, WIDTH)
        return dict(zip(numbers.tolist(), values, strict=True))

    @property
    def values(self) -> torch.Tensor:
        return self.service.stores["s"].own.get(0, 0).values.view(ROWS, WIDTH).clone()


# ---- merged rows --------------------------------------------------------------------------------------------------

some_rows = st.lists(st.none() | st.sets(st.integers(0, ROWS - 1)), min_size=WORKERS, max_size=WORKERS)


@pytest.mark.parametrize("mean", [True, False])
@settings(max_examples=30, deadline=None)
@given(rounds=st.lists(some_rows, min_size=1, max_size=4), data=st.data())
def test_merged_rows_are_the_mean_over_samples_or_the_sum_in_any_order_of_arrival(
    mean: bool, rounds: list[list[set[int] | None]], data: st.DataObject
) -> None:
    server = OneServer("merged", mean=mean, dtype=torch.float64)
    for number, touched in enumerate(rounds, 1):
        samples = data.draw(st.lists(st.sampled_from([0.0, 1.0, 3.0, 7.0]), min_size=WORKERS, max_size=WORKERS))
        grads = [
            None if one is None else gradient(sorted(one), 10 * number + rank, torch.float64)
            for rank, one in enumerate(touched)
        ]
        order = data.draw(st.permutations(range(WORKERS)))
        asked = {rank: server.push(rank, number, grads[rank], samples[rank]) for rank in order}
        counted = [(g, n if mean else 1.0) for g, n in zip(grads, samples, strict=True) if g is not None and n]
        found = [server.frames(rank, asked[rank]) for rank in range(WORKERS)]
        assert found[0] == found[1] == found[2], "all are told the same bytes"
        brought = server.rows(0, asked[0])
        if not counted:
            assert brought is None
            continue
        total = sum(g.to_dense() * n for g, n in counted) / (sum(samples) if mean else 1.0)
        assert brought is not None
        assert list(brought) == sorted({int(row) for g, _ in counted for row in g.indices()[0]})
        for row, values in brought.items():
            torch.testing.assert_close(values, total[row], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_order_of_arrival_does_not_change_a_bit_of_merged_rows(order: tuple[int, ...]) -> None:
    grads = [gradient(range(ROWS), rank) * 10.0 ** (3 * rank) for rank in range(WORKERS)]
    found = []
    for ranks in ((0, 1, 2), order):
        server = OneServer("merged")
        asked = {rank: server.push(rank, 1, grads[rank].coalesce(), samples=rank + 1.0) for rank in ranks}
        found.append(server.frames(0, asked[0]))
    assert found[0] == found[1]


def test_merged_rows_are_not_stored_and_not_those_of_the_round_before() -> None:
    server = OneServer("merged")
    for rank in range(WORKERS):
        first = server.push(rank, 1, gradient([1, 2], rank))
    assert list(server.rows(2, first) or ()) == [1, 2]
    for rank in range(WORKERS):
        second = server.push(rank, 2, gradient([5], rank) if rank else None)
    assert list(server.rows(2, second) or ()) == [5]
    for rank in range(WORKERS):
        third = server.push(rank, 3, None)
    assert server.rows(2, third) is None, "nobody had a gradient"
    assert server.service.stores["s"].own.get(0, 0).values.numel() == 1


@pytest.mark.parametrize("answers", ["merged", "changed"])
def test_round_that_one_worker_skips_brings_nothing(answers: str) -> None:
    server = OneServer(answers)
    for rank in range(WORKERS):
        asked = server.push(rank, 1, gradient([rank], rank), skip=rank == 1)
    assert server.rows(2, asked) == (None if answers == "merged" else {})
    for rank in range(WORKERS):
        asked = server.push(rank, 2, gradient([rank], rank))
    assert list(server.rows(2, asked) or ()) == [0, 1, 2]


def test_repeated_push_of_merged_rows_is_answered_again_and_counts_once() -> None:
    server = OneServer("merged", mean=False)
    grads = [gradient([rank, 4], rank) for rank in range(WORKERS)]
    server.push(0, 1, grads[0])
    server.push(0, 1, grads[0])
    server.push(1, 1, grads[1])
    last = server.push(2, 1, grads[2])
    again = server.push(2, 1, grads[2])
    assert server.frames(2, last) == server.frames(2, again)
    brought = server.rows(2, last)
    assert brought is not None
    torch.testing.assert_close(brought[4], sum(grad.to_dense() for grad in grads)[4])


def test_worker_that_leaves_is_not_waited_for_and_what_it_pushed_counts() -> None:
    server = OneServer("merged", mean=False)
    server.push(2, 1, gradient([6], 0))
    asked = server.push(0, 1, gradient([0], 1))
    server.ask(2, m.Leave("s"))
    assert (b"worker-0", asked) not in server.answers
    server.push(1, 1, None)
    assert list(server.rows(0, asked) or ()) == [0, 6]


def test_merged_rows_of_half_precision_keep_their_type() -> None:
    server = OneServer("merged", dtype=torch.bfloat16)
    for rank in range(WORKERS):
        asked = server.push(rank, 1, gradient([rank], rank, torch.bfloat16), samples=rank + 1.0)
    brought = server.rows(2, asked)
    assert brought is not None
    torch.testing.assert_close(brought[2], gradient([2], 2, torch.bfloat16).values()[0] * 0.5)


# ---- rows that changed --------------------------------------------------------------------------------------------


class Reader:
    """A worker's copy of the value, kept by what answers bring."""

    def __init__(self) -> None:
        self.values, self.told = start(), 0

    def take(self, rows: dict[int, torch.Tensor] | None) -> None:
        assert rows is not None
        for row, values in rows.items():
            self.values[row] = values
        self.told += len(rows)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "sparseadam", "rprop"])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(
    pushes=st.lists(st.tuples(st.integers(0, WORKERS - 1), st.none() | st.sets(st.integers(0, ROWS - 1))), max_size=30)
)
def test_who_takes_the_rows_that_changed_has_the_whole_value(
    policy: str, optimizer: str, pushes: list[tuple[int, set[int] | None]]
) -> None:
    server = OneServer("changed", POLICIES[policy], optimizer)
    readers, rounds = [Reader() for _ in range(WORKERS)], [0] * WORKERS
    waiting: dict[int, int] = {}
    for step, (rank, rows) in enumerate(pushes):
        if rank in waiting:
            continue
        rounds[rank] += 1
        waiting[rank] = server.push(rank, rounds[rank], None if rows is None else gradient(sorted(rows), step))
        for one, asked in list(waiting.items()):
            if (b"worker-%d" % one, asked) in server.answers:
                readers[one].take(server.rows(one, asked))
                del waiting[one]
                bucket = server.service.stores["s"].own.get(0, 0)
                seen = bucket.visible(bucket.slots[0].rule.unit[one]).view(ROWS, WIDTH)
                assert torch.equal(readers[one].values, seen)
    for rank in range(WORKERS):
        if rank not in waiting and policy != "groups":
            readers[rank].take(server.rows(rank, server.news(rank)))
            assert torch.equal(readers[rank].values, server.values)


def test_only_rows_that_changed_are_told_and_once() -> None:
    server = OneServer("changed", POLICIES["each"])
    server.push(0, 1, gradient([1], 0))
    server.push(0, 2, gradient([4], 0))
    asked = server.push(1, 1, gradient([6], 0))
    assert list(server.rows(1, asked) or ()) == [1, 4, 6]
    assert server.rows(1, server.news(1)) == {}
    assert list(server.rows(0, server.news(0)) or ()) == [6]
    assert list(server.rows(2, server.news(2)) or ()) == [1, 4, 6]


def test_dense_push_changes_all_rows() -> None:
    server = OneServer("changed", POLICIES["each"])
    server.push(0, 1, torch.ones(ROWS * WIDTH))
    assert list(server.rows(1, server.news(1)) or ()) == list(range(ROWS))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "sparseadam"])
def test_gradient_that_all_lack_is_no_step(optimizer: str) -> None:
    server, other = OneServer("changed", optimizer=optimizer), OneServer("changed", optimizer=optimizer)
    for rank in range(WORKERS):
        server.push(rank, 1, None)
    assert torch.equal(server.values, start())
    for rank in range(WORKERS):
        server.push(rank, 2, gradient([rank], rank))
        other.push(rank, 1, gradient([rank], rank))
    assert torch.equal(server.values, other.values), "the optimizer has counted no step"


def test_value_that_was_set_is_told_to_everybody_once() -> None:
    server = OneServer("changed", POLICIES["each"])
    server.push(0, 1, gradient([1], 0))
    server.ask(2, m.SetValues("s", [m.Entry(0, 0, 0, server.numel, 0)]), [to_frame(start() + 1)])
    for rank in range(WORKERS):
        told = server.rows(rank, server.news(rank))
        assert told is not None
        assert torch.equal(torch.stack(list(told.values())), start() + 1)
        assert server.rows(rank, server.news(rank)) == {}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_is_remembered_of_changes_is_bounded_and_never_too_little(data: st.DataObject) -> None:
    height = 50
    told, known = ChangedRows(height, [0, 1]), {0: torch.zeros(height, 1), 1: torch.zeros(height, 1)}
    value, chance = torch.zeros(height, 1), torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for version in range(1, data.draw(st.integers(1, 600))):
        rows = torch.unique(torch.randint(0, height, (5,), generator=chance))
        value[rows] = float(version)
        grad = gradient_of(rows, height)
        told.note(version, grad, 1.0, only_rows=True)
        if version % 3 == 0:
            found = told.take(0, version, value)
            assert found is not None
            assert found[0].numel() <= 15 + height * (version % 30 == 0)
            known[0][found[0]] = found[1]
            assert torch.equal(known[0], value)
        assert sum(height if one is None else one.numel() for _, one in told._log) <= 3 * height + 8 * 5
    last = told.take(1, 600, value)
    assert last is not None
    known[1][last[0]] = last[1]
    assert torch.equal(known[1], value)
    told.leave(0)
    told.leave(1)
    assert told.take(0, 600, value) is not None


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "change", "words"),
    [
        ("merged", {"rows": False, "want": False}, "takes rows only"),
        ("changed", {"entries": [m.Entry(0, 0, 0, 6, 1)]}, "read as a whole"),
        ("", {}, "not made to answer with rows"),
        ("merged", {"entries": [m.Entry(0, 0, 0, 1, 1)] * 2}, "rows of one key"),
    ],
)
def test_pushes_that_make_no_sense_are_refused_and_change_nothing(
    answers: str, change: dict[str, Any], words: str
) -> None:
    server = OneServer(answers, POLICIES["all" if answers == "merged" else "each"])
    push = m.Push("s", [m.Entry(0, 0, 0, server.numel, 1)], 1.0, b"", False, True, False, True)
    one = gradient([1, 3], 0)
    frames = [bytearray(to_frame(one.indices()[0])), bytearray(to_frame(one.values()))]
    answer = server.ask(0, msgspec.structs.replace(push, **change), frames)
    assert isinstance(answer, m.Failed)
    assert words in answer.text
    if answers:
        server.push(0, 1, one)
        for rank in (1, 2):
            asked = server.push(rank, 1, one)
        assert list(server.rows(2, asked) or ()) == [1, 3], "the round is still to come"


def test_merged_rows_need_rounds_of_all_workers_and_values_of_one_element() -> None:
    refused = OneServer("merged", POLICIES["each"]).made
    assert isinstance(refused, m.Failed)
    assert "no rounds of all workers" in refused.text
    server = OneServer("merged")
    wrong = m.BucketSpec(1, 2, ["f"], [2], [[ROWS, WIDTH]])
    for kind, text in (("merged", "2 elements for merged rows"), ("some", "no bucket of shape")):
        answer = server.ask(0, m.Init("s", 1, "float32", [wrong], kind), [to_frame(torch.zeros(2))])
        assert isinstance(answer, m.Failed)
        assert text in answer.text


def test_rows_of_a_key_of_which_none_are_stored_cannot_be_pulled() -> None:
    server = OneServer("merged")
    for frames in ([], [bytearray(to_frame(torch.tensor([1])))]):
        answer = server.ask(0, m.PullRows("s", m.Entry(0, 0, 0, 1, 0)), frames)
        assert isinstance(answer, m.Failed)
        assert "makes no sense here" in answer.text
