"""Keys without a gradient: zeros where somebody has one, and nothing at all where nobody has, as in one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.consistency import Policy
from paceline.kvstore.dist import DistStore
from paceline.testing.one_process import OneProcess
from paceline.wire import messages as m

KEYS = ["a", "b", "c", "d"]
SHAPES = [(5,), (3, 2), (7,), (2, 2)]
SAMPLES = [16.0, 48.0, 1.0, 16.0]
#: Hosts of workers, hosts of servers, shared memory.
PLACES = {
    "shared memory": ("aaa", "a", True),
    "frames": ("aaa", "a", False),
    "two servers": ("aaa", "aa", True),
    "local merge": ("aabb", "ab", True),
    "local merge by frames": ("aabb", "ab", False),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "adam": {"lr": 0.01, "weight_decay": 0.1},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
    "adagrad": {"lr": 0.1},
    "radam": {"lr": 0.01},
}
CLASSES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "radam": "RAdam"}
Grads = Sequence[torch.Tensor | None]


def start() -> list[torch.Tensor]:
    return [torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).view(shape) for shape in SHAPES]


def new_stores(job: OneProcess, optimizer: str | None = "sgd", policy: Policy | None = None) -> list[DistStore]:
    stores = job.stores(policy or Policy(), mean=True)
    for store in stores if optimizer is not None else ():
        store.set_optimizer(optimizer, **OPTIMIZERS[optimizer])
    for store in stores:
        store.init(KEYS, start())
        store.samples = SAMPLES[store.rank]
    return stores


def push(store: DistStore, grads: Grads, together: bool = True) -> None:
    """Push gradients; None: there is none. All keys as one, or key by key."""
    for positions in [range(len(KEYS))] if together else [[position] for position in range(len(KEYS))]:
        plan = store.table.plan(tuple(KEYS[position] for position in positions))
        for step in plan.steps:
            store.traffic.wait(step)
            absent = []
            for position, target, (block, index) in zip(positions, step.grads, step.places, strict=True):
                one = grads[position]
                target.fill_(float("nan")) if one is None else target.copy_(one)
                if one is None:
                    absent += block.ranges([index])
            for route, spans in step.sends.items():
                places = {one.place for one in spans}
                gone = [one for one in absent if one.place in places]
                store.traffic.push_ranges(route, spans, store.carried(), absent=gone)
            step.set_fresh(store.policy.merge == "all")


def pull(store: DistStore) -> list[torch.Tensor]:
    outs = [torch.full(shape, float("nan")) for shape in SHAPES]
    store.pull(KEYS, outs)
    return outs


def missing(store: DistStore) -> list[str]:
    return [key for key, (block, index) in zip(KEYS, store.table.locate(KEYS), strict=True) if block.is_missing(index)]


def random_grads(chance: random.Random) -> list[torch.Tensor | None]:
    make = torch.Generator().manual_seed(chance.randrange(10**9))
    return [torch.randn(shape, generator=make) if chance.random() < 0.6 else None for shape in SHAPES]


def joined(grads: Sequence[Grads]) -> list[torch.Tensor | None]:
    """Return the gradients of one process that sees all samples."""
    total, found = sum(SAMPLES[: len(grads)]), []
    for position, shape in enumerate(SHAPES):
        parts = [(one[position], samples) for one, samples in zip(grads, SAMPLES, strict=False)]
        have = [part * (samples / total) for part, samples in parts if part is not None]
        found.append(sum(have, torch.zeros(shape)) if have else None)
    return found


class Oracle:
    """One process with torch's own optimizer."""

    def __init__(self, name: str) -> None:
        self.params = [torch.nn.Parameter(value) for value in start()]
        self.optimizer = getattr(torch.optim, CLASSES[name])(self.params, **OPTIMIZERS[name])

    def step(self, grads: Grads) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        self.optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_training_is_that_of_one_process_with_all_samples(place: str, optimizer: str) -> None:
    workers, servers, shared = PLACES[place]
    job = OneProcess(workers, servers, seed=3, shared_memory=shared, bigarray_bound=8)
    stores, oracle, chance = new_stores(job, optimizer), Oracle(optimizer), random.Random(optimizer + place)
    for round in range(12):
        grads = [random_grads(chance) for _ in stores]
        for store in chance.sample(stores, len(stores)):
            push(store, grads[store.rank], together=round % 3 != 2)
        total = joined(grads)
        oracle.step(total)
        for store in stores:
            for found, wanted in zip(pull(store), oracle.params, strict=True):
                torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)
            assert missing(store) == [key for key, grad in zip(KEYS, total, strict=True) if grad is None]
    states = stores[0].optimizer_states()
    for key, param in zip(KEYS, oracle.params, strict=True):
        for name, wanted in oracle.optimizer.state[param].items():
            if wanted is not None:
                torch.testing.assert_close(states[key][name].view(wanted.shape), wanted, rtol=1e-4, atol=1e-6)


def test_a_key_that_nobody_had_a_gradient_for_has_no_state() -> None:
    stores = new_stores(OneProcess("aa"), "adam")
    for store in stores:
        push(store, [torch.ones(5), None, None, None])
    states = stores[0].optimizer_states()
    assert [bool(states[key]) for key in KEYS] == [True, False, False, False]


def test_the_round_of_an_absent_bucket_counts_and_changes_nothing() -> None:
    job = OneProcess("aa")
    stores = new_stores(job)
    for _ in range(3):
        for store in stores:
            push(store, [None] * 4)
    for found, wanted in zip(pull(stores[1]), start(), strict=True):
        assert torch.equal(found, wanted)
    held = job.services[0].stores["s"].own
    assert {slot.rule.version for slot in held.get(0, 0).slots} == {3}
    pushes = [body for _, _, body in job.requests if isinstance(body, m.Push)]
    assert all(len(body.absent) == len(body.entries) for body in pushes)


@pytest.mark.parametrize("place", PLACES)
def test_merged_gradients_tell_who_has_none(place: str) -> None:
    workers, servers, shared = PLACES[place]
    stores = new_stores(OneProcess(workers, servers, shared_memory=shared), None)
    chance = random.Random(1)
    for _ in range(6):
        grads = [random_grads(chance) for _ in stores]
        for store in stores:
            push(store, grads[store.rank])
        total = joined(grads)
        for store in stores:
            for key, found, wanted in zip(KEYS, pull(store), total, strict=True):
                torch.testing.assert_close(found, torch.zeros_like(found) if wanted is None else wanted)
                assert (key in missing(store)) == (wanted is None)


@pytest.mark.parametrize("merge", [Policy("each"), Policy("groups", ((0, 1), (2,))), Policy("first", first=2)])
def test_other_merges_step_what_had_a_gradient(merge: Policy) -> None:
    job = OneProcess("aaa")
    stores = new_stores(job, "sgd", merge)
    for store in stores:
        push(store, [torch.ones(5), None, None, None])
    job.deliver_all()
    before = start()
    for store in stores[: 2 if merge.merge == "groups" else 3]:
        found = pull(store)
        assert not torch.equal(found[0], before[0])
        assert all(torch.equal(one, other) for one, other in zip(found[1:], before[1:], strict=True))


@pytest.mark.parametrize("codec", ["int8", "1bit", "2bit", "topk", "chunktopk", "powersgd"])
def test_coded_pushes_bring_nothing_for_absent_keys(codec: str) -> None:
    stores = new_stores(OneProcess("aa"))
    for store in stores:
        store.set_gradient_compression({"type": codec})
    # What the first push held back for b to d must not come with the second.
    for grads in ([torch.full(shape, 0.3) for shape in SHAPES], [torch.full((5,), 0.3), None, None, None]):
        before = [pull(store) for store in stores]
        held = [store.codec_states() for store in stores]
        for store in stores:
            push(store, grads)
    for store, values, residuals in zip(stores, before, held, strict=True):
        found = pull(store)
        assert not torch.equal(found[0], values[0])
        assert all(torch.equal(one, other) for one, other in zip(found[1:], values[1:], strict=True))
        assert missing(store) == KEYS[1:]
        for key in KEYS[1:] if residuals else ():
            assert torch.equal(store.codec_states()[key]["residual"], residuals[key]["residual"])
    for store in stores:
        push(store, [None] * 4)
    assert [torch.equal(*pair) for pair in zip(pull(stores[0]), found, strict=True)] == [True] * 4


@pytest.mark.parametrize("shared", [True, False])
def test_compressed_answers_tell_what_nobody_had(shared: bool) -> None:
    stores = new_stores(OneProcess("aa", shared_memory=shared))
    for store in stores:
        store.set_gradient_compression({"type": "int8", "leg": "pull"})
    for grads in ([torch.ones(shape) for shape in SHAPES], [torch.ones(5), None, torch.ones(7), None]):
        for store in stores:
            push(store, grads)
    for store in stores:
        pull(store)
        assert missing(store) == ["b", "d"]


def test_an_answer_given_again_says_the_same() -> None:
    job = OneProcess("aa")
    stores = new_stores(job)
    for store in stores:
        push(store, [torch.ones(5), None, None, None])
    pull(stores[0])
    asked = next(body for peer, _, body in job.requests if isinstance(body, m.Push) and peer == "worker 0")
    answers: list[m.Body] = []
    for peer in ("worker 0", "worker 1"):
        job.send(peer, 0, asked, [], lambda body, frames: answers.append(body))
    job.deliver_all()
    block, _ = stores[0].table.locate(["b"])[0]
    listed = [m.Span(0, 0, start, stop - start) for start, stop in block.missing[0]]
    assert [body.absent for body in answers if isinstance(body, m.Values)] == [listed, listed]


def test_who_has_no_samples_does_not_make_a_key_present() -> None:
    stores = new_stores(OneProcess("aa"))
    stores[0].samples = 0.0
    push(stores[0], [torch.zeros(shape) for shape in SHAPES])
    push(stores[1], [torch.ones(5), None, None, None])
    pull(stores[0])
    assert missing(stores[0]) == ["b", "c", "d"]


@pytest.mark.parametrize("place", [(0, 0, 0, 3), (0, 0, 2, 3), (0, 1, 0, 5), (0, 0, 0, 50)])
def test_absent_parts_that_are_no_keys_of_the_push_are_refused(place: tuple[int, int, int, int]) -> None:
    job = OneProcess("a")
    [store] = new_stores(job)
    block, _ = store.table.locate(["a"])[0]
    body = m.Push("s", [m.Entry(0, 0, 0, block.layout.buckets[0].length, 1)], 1.0, b"", False, True, True)
    body.absent = [m.Span(*place)]
    found: list[m.Body] = []
    job.send("worker 0", 0, body, [], lambda body, frames: found.append(body))
    job.deliver_all()
    assert isinstance(found[0], m.Failed)
    push(store, [torch.ones(shape) for shape in SHAPES])
    pull(store)


def test_a_usual_push_names_nothing() -> None:
    job = OneProcess("a")
    [store] = new_stores(job)
    push(store, [torch.ones(shape) for shape in SHAPES])
    pull(store)
    [body] = [body for _, _, body in job.requests if isinstance(body, m.Push)]
    assert body.absent == []
    assert len(body.entries) == 1
