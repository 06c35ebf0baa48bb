"""Clipping by the norm over all keys and servers: what one process with all samples does."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.consistency import Policy
from paceline.errors import ConfigError, PacelineError, ProtocolError, RemoteError
from paceline.kvstore.dist import DistStore
from paceline.testing.one_process import OneProcess
from paceline.wire import messages as m

KEYS, SHAPES = ["a", "b", "c"], [(5,), (3, 4), (50,)]
SAMPLES = [16.0, 48.0, 1.0, 16.0]
PLACES = {
    "shared memory": ("aaa", "a", True),
    "frames": ("aaa", "a", False),
    "two servers": ("aaa", "aa", True),
    "local merge": ("aabb", "ab", True),
    "local merge by frames": ("aabb", "ab", False),
}
GROUPS = Policy("groups", ((0, 1), (2,)), weighting="inverse")


def new_stores(
    job: OneProcess, clip_norm: float = 1.0, policy: Policy | None = None, dtype: torch.dtype = torch.float32
) -> list[DistStore]:
    stores = job.stores(policy or Policy(), mean=True, clip_norm=clip_norm)
    for store in stores:
        store.set_optimizer("adam", lr=0.1, weight_decay=0.1)
    for store in stores:
        store.init(KEYS, [torch.ones(shape, dtype=dtype) for shape in SHAPES])
        store.samples = SAMPLES[store.rank]
    return stores


def push(store: DistStore, grads: Sequence[torch.Tensor | None], together: bool = True, skip: bool = False) -> None:
    for positions in [range(len(KEYS))] if together else [[position] for position in range(len(KEYS))]:
        for step in store.table.plan(tuple(KEYS[position] for position in positions)).steps:
            store.traffic.wait(step)
            absent = []
            for position, target, (block, index) in zip(positions, step.grads, step.places, strict=True):
                grad = grads[position]
                if grad is None:
                    absent += block.ranges([index])
                else:
                    target.copy_(grad)
            for route, spans in step.sends.items():
                places = {one.place for one in spans}
                gone = [one for one in absent if one.place in places]
                store.traffic.push_ranges(route, spans, replace(store.carried(), skip=skip), absent=gone)
            step.set_fresh(True)


def pull(store: DistStore) -> torch.Tensor:
    outs = [torch.zeros(shape) for shape in SHAPES]
    store.pull(KEYS, outs)
    return torch.cat([out.view(-1) for out in outs])


def gradients(seed: int, size: float = 1.0) -> list[torch.Tensor | None]:
    make = torch.Generator().manual_seed(seed)
    return [size * torch.randn(shape, generator=make) for shape in SHAPES]


class Oracle:
    """One process with torch's clipping and optimizer."""

    def __init__(self, clip_norm: float) -> None:
        self.params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        self.optimizer = torch.optim.Adam(self.params, lr=0.1, weight_decay=0.1)
        self.clip_norm = clip_norm

    def step(self, grads: Sequence[Sequence[torch.Tensor | None]]) -> float:
        total = sum(SAMPLES[: len(grads)])
        for position, param in enumerate(self.params):
            parts = [(one[position], samples / total) for one, samples in zip(grads, SAMPLES, strict=False)]
            have = [grad * share for grad, share in parts if grad is not None]
            param.grad = sum(have, torch.zeros(param.shape)) if have else None
        norm = torch.nn.utils.clip_grad_norm_(self.params, self.clip_norm)
        self.optimizer.step()
        return float(norm)

    @property
    def values(self) -> torch.Tensor:
        return torch.cat([param.detach().view(-1) for param in self.params])


@pytest.mark.parametrize("place", PLACES)
def test_training_is_that_of_one_process_that_clips(place: str) -> None:
    workers, servers, shared = PLACES[place]
    job = OneProcess(workers, servers, seed=5, shared_memory=shared, bigarray_bound=16)
    stores, oracle, chance = new_stores(job, 2.0), Oracle(2.0), random.Random(place)
    clipped = set()
    for round in range(8):
        grads = [gradients(10 * round + store.rank, 3.0 if round % 2 else 0.1) for store in stores]
        for one in grads[1:] if round % 3 == 1 else grads[:0]:
            one[1] = None
        if round == 4:
            for one in grads:
                one[0] = None
        wanted = oracle.step(grads)
        for store in chance.sample(stores, len(stores)):
            push(store, grads[store.rank], together=round != 5)
        for store in chance.sample(stores, len(stores)):
            norm = store.clip_round()
            assert norm == pytest.approx(wanted, rel=1e-5)
            clipped.add(norm > 2.0)
        for store in stores:
            torch.testing.assert_close(pull(store), oracle.values, rtol=1e-5, atol=1e-6)
    assert clipped == {True, False}


def run(seed: int, place: str) -> torch.Tensor:
    workers, servers, shared = PLACES[place]
    chance = random.Random(seed)
    stores = new_stores(OneProcess(workers, servers, seed, shared_memory=shared, bigarray_bound=16))
    for round in range(3):
        for store in chance.sample(stores, len(stores)):
            push(store, gradients(10 * round + store.rank))
        for store in chance.sample(stores, len(stores)):
            store.clip_round()
        for store in stores:
            pull(store)
    return pull(stores[0])


@pytest.mark.parametrize("place", PLACES)
def test_results_are_the_same_bit_for_bit_whoever_comes_first(place: str) -> None:
    first = run(0, place)
    assert all(torch.equal(run(seed, place), first) for seed in range(1, 5))


def test_nothing_is_applied_or_answered_before_the_first_commit() -> None:
    job = OneProcess("aa")
    stores = new_stores(job)
    for store in stores:
        push(store, gradients(store.rank))
    job.deliver_all()
    before = job.services[0].stores["s"].own.get(0, 0).values.clone()
    assert torch.equal(before[:5], torch.ones(5))
    assert not all(call.done for store in stores for call in calls(store))
    stores[1].clip_round()
    job.deliver_all()
    assert all(call.done for store in stores for call in calls(store))
    after = pull(stores[0])
    # The other asks late, gets the same norm, and its commit changes nothing.
    norm = stores[0].clip_round()
    job.deliver_all()
    assert norm == pytest.approx(Oracle(1.0).step([gradients(0), gradients(1)]), rel=1e-5)
    assert torch.equal(pull(stores[1]), after)


def calls(store: DistStore) -> list[Any]:
    return [call for block in store.table.blocks.values() for side in block.buckets for _, call in side.sending]


def test_who_asks_before_all_have_pushed_waits_for_them() -> None:
    job = OneProcess("aa", bigarray_bound=16)
    stores = new_stores(job)
    push(stores[0], gradients(0))
    with pytest.raises(PacelineError, match="waits for ever: norm of a round"):
        stores[0].clip_round()
    push(stores[1], gradients(1), together=False)  # cuts slots that are asked for
    norm = stores[1].clip_round()
    assert norm == pytest.approx(Oracle(1.0).step([gradients(0), gradients(1)]), rel=1e-5)


@pytest.mark.parametrize("where", ["before the norm", "before the commit", "after the commit"])
def test_slots_that_are_cut_between_keep_their_norm(where: str) -> None:
    job = OneProcess("aa")
    stores, oracle = new_stores(job), Oracle(1.0)
    for store in stores:
        push(store, gradients(store.rank))
    wanted = oracle.step([gradients(0), gradients(1)])
    bucket = job.services[0].stores["s"].own.get(0, 0)
    if where == "before the norm":
        job.deliver_all()
        bucket.cut(m.Span(0, 0, 0, 5))
    found = [stores[0].clip_round()]
    if where != "before the norm":
        if where == "after the commit":
            job.deliver_all()
        bucket.cut(m.Span(0, 0, 0, 5))
    found.append(stores[1].clip_round())
    assert found == pytest.approx([wanted] * 2, rel=1e-5)
    torch.testing.assert_close(pull(stores[0]), oracle.values, rtol=1e-5, atol=1e-6)


def test_questions_and_late_commits_cut_nothing() -> None:
    job = OneProcess("aa")
    stores = new_stores(job)
    bucket = job.services[0].stores["s"].own.get(0, 0)
    part = [m.Entry(0, 0, 3, 9, 1)]
    for store in stores:
        push(store, gradients(store.rank))
    job.deliver_all()
    assert isinstance(stores[0].session.call_server(0, m.AskNorm("s", part), "norm"), m.NormIs)
    norms = [stores[0].clip_round()]
    stores[1].session.call_server(0, m.Commit("s", part, 0.5), "commit")
    norms.append(stores[1].clip_round())
    assert len(bucket.slots) == 1
    assert norms[0] == norms[1] == pytest.approx(Oracle(1.0).step([gradients(0), gradients(1)]), rel=1e-5)


def test_a_commit_for_a_part_of_what_is_held_applies_that_part() -> None:
    job = OneProcess("aa")
    stores = new_stores(job)
    bucket = job.services[0].stores["s"].own.get(0, 0)
    for store in stores:
        push(store, gradients(store.rank))
    job.deliver_all()
    assert isinstance(stores[0].session.call_server(0, m.Commit("s", [m.Entry(0, 0, 0, 5, 1)], 1.0), "commit"), m.Done)
    assert [(slot.span.start, bool(slot.clipping.held)) for slot in bucket.slots] == [(0, False), (5, True)]
    assert not torch.equal(bucket.values[:5], torch.ones(5))
    assert torch.equal(bucket.values[5:17], torch.ones(12))


def test_who_asks_after_slots_were_joined_gets_the_same_bits() -> None:
    job = OneProcess("aa")
    stores, oracle = new_stores(job), Oracle(1.0)
    bucket = job.services[0].stores["s"].own.get(0, 0)
    for round in range(4):
        grads = [gradients(10 * round + store.rank) for store in stores]
        wanted = oracle.step(grads)
        for store in stores:
            push(store, grads[store.rank], together=round == 3)
        first = stores[0].clip_round()
        job.deliver_all()
        if round == 2:
            assert len(bucket.slots) == 3
            # As worker 0 does with its next push.
            assert len(bucket.cut(m.Span(0, 0, 0, bucket.values.numel()))) == 1
        assert stores[1].clip_round() == first == pytest.approx(wanted, rel=1e-5)
    assert len(bucket.slots) == 1
    for store in stores:
        torch.testing.assert_close(pull(store), oracle.values, rtol=1e-5, atol=1e-6)


def test_a_late_question_for_one_of_the_joined_slots_counts_that_one() -> None:
    job = OneProcess("aa")
    stores = new_stores(job)
    bucket = job.services[0].stores["s"].own.get(0, 0)
    for store in stores:
        push(store, gradients(store.rank), together=False)
    stores[0].clip_round()
    job.deliver_all()
    entry = m.Entry(0, 0, 5, 12, 1)
    before = stores[1].session.call_server(0, m.AskNorm("s", [entry]), "norm")
    assert len(bucket.cut(m.Span(0, 0, 0, bucket.values.numel()))) == 1
    for entries in ([entry], [entry, entry], [m.Entry(0, 0, 5, 6, 1), m.Entry(0, 0, 11, 6, 1)]):
        assert stores[1].session.call_server(0, m.AskNorm("s", entries), "norm") == before


def test_a_question_waits_for_its_own_range_alone() -> None:
    job = OneProcess("aa")
    stores = new_stores(job)
    found: list[m.Reply] = []
    call = stores[0].session.ask_server(
        0, m.AskNorm("s", [m.Entry(0, 0, 0, 5, 1)]), "norm", (), lambda body, frames: found.append(body)
    )
    job.deliver_all()
    for store in stores:
        block = store.table.blocks[0]
        [part] = block.ranges([0])
        store.traffic.push_ranges(block.routes[0], [part], store.carried())
    job.deliver_all()
    assert call.done
    assert isinstance(found[0], m.NormIs)


def test_every_group_clips_its_own_gradient() -> None:
    job = OneProcess("aaa")
    stores = new_stores(job, policy=GROUPS)
    for store in stores:
        push(store, gradients(store.rank, 1.0 + store.rank))
    norms = [store.clip_round() for store in stores]
    assert norms[0] == norms[1] == pytest.approx(Oracle(1.0).step([gradients(0), gradients(1, 2.0)]), rel=1e-5)
    assert norms[2] == pytest.approx(Oracle(1.0).step([gradients(2, 3.0)]), rel=1e-5)
    assert torch.equal(pull(stores[0]), pull(stores[1]))
    assert not torch.equal(pull(stores[0]), pull(stores[2]))


def test_norms_that_are_not_finite() -> None:
    stores = new_stores(OneProcess("aa"))
    for store in stores:
        push(store, [torch.full(shape, math.nan if store.rank else 1.0) for shape in SHAPES])
    assert all(math.isnan(store.clip_round()) for store in stores)
    assert bool(pull(stores[0]).isnan().any())
    assert stores[0].stats()["skipped"] == 0.0


def test_a_skipped_push_keeps_the_round_from_all_slots() -> None:
    stores = new_stores(OneProcess("aa", "aa", bigarray_bound=8))
    for store in stores:
        for position, key in enumerate(KEYS):
            for step in store.table.plan((key,)).steps:
                for route, spans in step.sends.items():
                    carried = replace(store.carried(), skip=store.rank == 1 and position == 0)
                    store.traffic.push_ranges(route, spans, carried)
    for store in stores:
        store.clip_round()
    assert torch.equal(pull(stores[0]), torch.ones(67))


def test_commits_for_other_rounds_change_nothing() -> None:
    job = OneProcess("aa")
    stores = new_stores(job)
    for store in stores:
        push(store, gradients(store.rank))
    length = stores[0].table.blocks[0].layout.buckets[0].length
    job.deliver_all()
    for round in (0, 2, 7):
        body = m.Commit("s", [m.Entry(0, 0, 0, length, round)], 1.0)
        assert isinstance(stores[0].session.call_server(0, body, "commit"), m.Done)
    assert not any(call.done for call in calls(stores[0]))
    for round in (0, 3):
        with pytest.raises(ProtocolError, match=f"asks for the norm of round {round} after round 1"):
            stores[0].session.call_server(0, m.AskNorm("s", [m.Entry(0, 0, 0, length, round)]), "norm")


def test_a_push_asked_again_is_answered_by_the_commit_and_the_next_waits_for_it() -> None:
    job = OneProcess("aa", shared_memory=False)
    stores = new_stores(job)
    for store in stores:
        push(store, gradients(store.rank))
    job.deliver_all()
    [asked] = [body for peer, _, body in job.requests if isinstance(body, m.Push) and peer == "worker 0"]
    frames = [bytearray(4 * entry.length) for entry in asked.entries]
    answers: list[m.Body] = []
    job.send("worker 0", 0, asked, frames, lambda body, frames: answers.append(body))
    job.deliver_all()
    assert not answers
    nexts = [m.Entry(e.block, e.bucket, e.start, e.length, 2) for e in asked.entries]
    early = m.Push("s", nexts, 1.0, b"", False, True, False)
    with pytest.raises(ProtocolError, match="round 2 of worker 0 came before round 1 was answered"):
        stores[0].session.wait([stores[0].session.ask_server(0, early, "push", frames)])
    stores[1].clip_round()
    job.deliver_all()
    assert [type(body) for body in answers] == [m.Values]


def test_who_is_left_goes_on_when_a_worker_leaves() -> None:
    job = OneProcess("aaa")
    stores = new_stores(job)
    for store in stores:
        push(store, gradients(store.rank))
    job.deliver_all()
    stores[0].session.call_server(0, m.Leave("s"), "leaving")
    norms = [store.clip_round() for store in stores[1:]]
    assert norms == pytest.approx([Oracle(1.0).step([gradients(0), gradients(1), gradients(2)])] * 2, rel=1e-5)
    pull(stores[1])
    pull(stores[2])
    for store in stores[1:]:
        push(store, gradients(9))
    for store in stores[1:]:
        store.clip_round()
    assert torch.equal(pull(stores[1]), pull(stores[2]))


def test_what_nobody_can_commit_any_more_is_dropped() -> None:
    job = OneProcess("aa")
    stores = new_stores(job, policy=Policy("groups", ((0,), (1,))))
    push(stores[0], gradients(0))
    job.deliver_all()
    stores[0].session.call_server(0, m.Leave("s"), "leaving")
    store = job.services[0].stores["s"].own
    assert store.stats.skipped == 1
    assert not store.get(0, 0).slots[0].clipping.held
    push(stores[1], gradients(1))
    stores[1].clip_round()
    assert not torch.equal(pull(stores[1]), torch.ones(67))


def test_unlike_options_are_told_to_those_who_ask_for_the_norm() -> None:
    stores = new_stores(OneProcess("aa"))
    for store in stores:
        store.set_options([{"lr": 0.1 * (1 + store.rank)}])
        push(store, gradients(store.rank))
    for store in stores:
        with pytest.raises(ConfigError, match="lr of param group 0"):
            store.clip_round()


def test_an_update_that_fails_is_told_to_all() -> None:
    job = OneProcess("aa")
    stores = new_stores(job)
    for store in stores:
        store.set_options([{"lr": 0.1, "betas": 1.0}])
        push(store, gradients(store.rank))
    stores[0].clip_round()
    for store in stores:
        with pytest.raises(RemoteError, match="the update of 'a'") as failure:
            pull(store)
        assert "worker 1 pushed round 1" in str(failure.value)


def test_small_types_are_summed_as_wide_ones() -> None:
    stores = new_stores(OneProcess("aa"), dtype=torch.float16)
    for store in stores:
        push(store, [torch.full(shape, 300.0) for shape in SHAPES])
    assert stores[0].clip_round() == pytest.approx(300.0 * math.sqrt(67), rel=1e-3)


def test_compressed_answers_come_with_the_commit() -> None:
    stores = new_stores(OneProcess("aa", shared_memory=False))
    for store in stores:
        store.set_gradient_compression({"type": "int8", "leg": "both"})
    for round in range(3):
        for store in stores:
            push(store, gradients(2 * round + store.rank))
        for store in stores:
            store.clip_round()
        assert torch.equal(pull(stores[0]), pull(stores[1]))


def test_rows_count_as_any_other_key() -> None:
    stores = OneProcess("aa").stores(mean=True, clip_norm=1.0)
    for store in stores:
        store.set_optimizer("sgd", lr=1.0)
    for store in stores:
        store.init(["rows", "a"], [torch.zeros(4, 2).to_sparse(1), torch.zeros(3)])
    for store in stores:
        rows = torch.zeros(4, 2).index_fill_(0, torch.tensor([store.rank]), 6.0).to_sparse(1)
        store.push(["rows", "a"], [rows, torch.full((3,), 4.0)])
    wanted = math.sqrt(4 * 9.0 + 3 * 16.0)
    assert [store.clip_round() for store in stores] == pytest.approx([wanted] * 2)
    out = torch.zeros(3)
    stores[0].pull("a", out)
    torch.testing.assert_close(out, torch.full((3,), -4.0 / wanted))


@pytest.mark.parametrize("merge", [Policy("each"), Policy("first", first=1)])
def test_merges_without_a_round_do_not_clip(merge: Policy) -> None:
    job = OneProcess("a")
    with pytest.raises(ValueError, match="no merged gradient to clip"):
        job.stores(merge, clip_norm=1.0)
    [store] = job.stores(merge)
    with pytest.raises(ValueError, match="no merged gradient to clip"):
        store.for_optimizer(mean=True, clip_norm=1.0)
    for norm, policy in ((1.0, merge), (-1.0, Policy()), (math.inf, Policy())):
        body = m.OpenStore("t", policy.merge, [], policy.first, -1, "none", True, clip_norm=norm)
        with pytest.raises(ValueError, match="clip"):
            store.session.call_server(0, body, "opening")


def test_workers_with_other_norms_are_told() -> None:
    job = OneProcess("aa")
    stores = [job.stores(clip_norm=norm)[rank] for rank, norm in enumerate((1.0, 2.0))]
    stores[0].for_optimizer(mean=True, clip_norm=1.0).lifecycle.open()
    with pytest.raises(ValueError, match=r"norms up to 2, .* but it is open as .* norms up to 1,"):
        stores[1].for_optimizer(mean=True, clip_norm=2.0).lifecycle.open()


def test_a_store_that_does_not_clip_is_asked_for_no_norm() -> None:
    job = OneProcess("a")
    [store] = new_stores(job, 0.0)
    push(store, gradients(0))
    assert store.clip_round() == 0.0
    pull(store)
    for body in (m.AskNorm("s", [m.Entry(0, 0, 0, 5, 1)]), m.Commit("s", [m.Entry(0, 0, 0, 5, 1)], 1.0)):
        with pytest.raises(ProtocolError, match="does not clip"):
            store.session.call_server(0, body, "norm")
