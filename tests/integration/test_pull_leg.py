"""Pulls are compressed in every store and on every transport, and all workers hold what one process computes."""

import functools
import hashlib

import pytest
import torch
from torch import nn

from paceline import DistributedOptimizer, compression, kvstore
from paceline.errors import ProtocolError
from paceline.gluon import Trainer, backward, replicate, split_and_load
from paceline.mx.context import cpu
from paceline.testing import LocalJob
from paceline.worker import answers
from paceline.worker.current import current_session

WORKERS, ROUNDS, NUMEL = 3, 6, 3000
TRANSPORTS = {
    "shared memory": {},
    "tcp": {"shared_memory": False, "unix_sockets": False, "encrypt": False},
}
STORES = ("dist_sync", "dist_async", "dist_ssync", "dist_gsync", "dist_ksync")
CODECS = ("int8", "fp16")


# ---- what runs in the workers --------------------------------------------------------------------------------------


def digest(*tensors):
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()


def gradient(rank, round):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * round + rank)) / 7


class Counting:
    """Counts the frames of answers that were encoded."""

    def __init__(self):
        self.coded = self.plain = 0
        self._store = answers.store_known
        answers.store_known = self

    def __call__(self, blocks, entries, shared, codec, told, frames):
        self.coded += 0 if shared else sum(one.coded for one in told)
        self.plain += 0 if shared else sum(not one.coded for one in told)
        self._store(blocks, entries, shared, codec, told, frames)


@functools.cache
def simulate(name):
    """What the manual says, in one process: the values that every worker holds after each round."""
    codec = compression.make(name)
    states = [codec.new_state(NUMEL) for _ in range(WORKERS)]
    values = torch.linspace(-1, 1, NUMEL)
    known, held = values.clone(), []
    for round in range(1, ROUNDS + 1):
        total = torch.zeros(NUMEL)
        for rank, state in enumerate(states):
            codec.decode_add(codec.encode(gradient(rank, round), state, round=round), total)
        values.add_(total, alpha=0.25)
        payload = codec.encode(values - known, codec.new_state(NUMEL), round=round)
        codec.decode_add(payload, known)
        held.append(digest(known))
    return held


def arithmetic(name, verb, counting):
    """The same with real servers; returns what was held after each round, and how it came."""
    store = kvstore.create("dist_sync")
    store.set_updater("add", rate=0.25)
    store.set_gradient_compression({"type": name, "leg": "both"})
    store.broadcast("x", torch.linspace(-1, 1, NUMEL), torch.zeros(NUMEL))
    coded, out, held = counting.coded, torch.zeros(NUMEL), []
    for round in range(1, ROUNDS + 1):
        if verb == "pushpull":
            store.pushpull("x", gradient(store.rank, round), out)
        else:
            store.push("x", gradient(store.rank, round))
            store.pull("x", out)
        held.append(digest(out))
    coded = counting.coded - coded
    store.barrier()
    store.pull("x", out)
    return held, coded, digest(out) == held[-1]


def descent(kind, counting):
    """Workers pull a point towards the mean of their targets; returns how far it ends, and digests of what is held."""
    store = kvstore.create(kind, **{"dist_gsync": {"groups": [["0", "1"], ["2"]]}}.get(kind, {}))
    store.set_optimizer("sgd", learning_rate=0.08)
    store.set_gradient_compression({"type": "int8"})
    store.set_gradient_compression({"type": "fp16", "leg": "pull"})
    points = [torch.zeros(40), torch.zeros(2000)]
    store.broadcast(["a", "b"], points, points)
    before = counting.coded
    for number in range(40):
        if number % 5 == 0:
            store.barrier()  # else who is much slower ends alone, at its own target
        store.pushpull(["a", "b"], [one - store.rank for one in points], points)
    coded, held = counting.coded - before, digest(*points)
    store.barrier()
    fresh = [torch.zeros(40), torch.zeros(2000)]
    store.pull(["a", "b"], fresh)
    return max(float((one - 1.0).abs().max()) for one in fresh), coded, held, digest(*fresh)


def lookers_on():
    """Worker 0 only reads, without pushing: it gets what the others have pushed."""
    store = kvstore.create("dist_async")
    store.set_optimizer("sgd", learning_rate=1.0)
    store.set_gradient_compression({"type": "int8", "leg": "pull"})
    out = torch.zeros(50)
    store.broadcast("x", torch.zeros(50), out)
    if store.rank:
        store.pushpull("x", torch.full((50,), -1.0), out)
    store.barrier()
    store.pull("x", out)
    return sorted(set(out.tolist()))


def on_the_worker():
    """The optimizer runs in the workers: what is pulled are merged gradients."""
    torch.manual_seed(current_session().rank)
    model = nn.Linear(30, 4)
    inner = torch.optim.Adam(model.parameters(), lr=0.08)
    settings = {"type": "int8", "leg": "pull"}
    optimizer = DistributedOptimizer(inner, "dist_sync", model=model, update="worker", compression=settings)
    return fitted(model, optimizer, 90, set_to_none=False)


def fitted(model, optimizer, steps, set_to_none=True):
    """Fit a linear map; return the largest difference to it, and a digest of the weights."""
    solution = torch.randn(4, 30, generator=torch.Generator().manual_seed(5))
    for step in range(steps):
        inputs = torch.randn(32, 30, generator=torch.Generator().manual_seed(1000 * step + current_session().rank))
        optimizer.zero_grad(set_to_none=set_to_none)
        (model(inputs) - inputs @ solution.T).square().mean().backward()
        optimizer.step()
    return float((model.weight.detach() - solution).abs().max()), digest(*model.parameters())


def inherited():
    """A store that is in use gives an optimizer a sibling, which compresses like it."""
    store = kvstore.create("dist_sync")
    store.set_gradient_compression([{"type": "2bit", "threshold": 0.5}, {"type": "int8", "leg": "pull"}])
    torch.manual_seed(store.rank)
    model = nn.Linear(30, 4)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2), store, model=model, update="server")
    codecs = {leg: one.name for leg, one in optimizer.kvstore.traffic.codecs.items()}
    return [optimizer.kvstore is not store, codecs, *fitted(model, optimizer, 75)]


def by_trainer():
    """Gluon's Trainer with two devices per worker."""
    solution = torch.tensor([1.0, -2.0, 0.5, 3.0])
    net = replicate(nn.Linear(4, 1, bias=False), [cpu(0), cpu(1)])
    trainer = Trainer(net, "sgd", {"lr": 0.04}, "dist_sync", compression_params={"type": "int8", "leg": "both"})
    data = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(50):
        points = split_and_load(data.chunk(WORKERS)[trainer.kvstore.rank], net.contexts)
        outputs = [
            (out.flatten() - part @ solution).square().sum() for out, part in zip(net(points), points, strict=True)
        ]
        backward(outputs)
        trainer.step(20)
    return float((net.replicas[1].weight.flatten() - solution).abs().max().detach()), digest(net.replicas[0].weight)


def by_rows():
    """Rows are pushed and pulled as they are, beside a key that is compressed."""
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.set_gradient_compression({"type": "int8", "leg": "pull"})
    start = torch.arange(40.0).view(10, 4) / 3
    store.init(["rows", "dense"], [start.to_sparse(1), torch.zeros(5)])
    ids, ones = torch.tensor([[1, 7]]), torch.full((2, 4), 1 / 3)
    for _ in range(2):
        store.push("rows", torch.sparse_coo_tensor(ids, ones, (10, 4), check_invariants=True))
        store.pushpull("dense", torch.ones(5))
    out = torch.zeros(10, 4)
    store.row_sparse_pull("rows", out, row_ids=torch.arange(10))
    expected = start.clone()
    for _ in range(2):
        expected[[1, 7]] += ones + ones + ones
    whole = torch.zeros(10, 4)
    store.pull("rows", whole)
    return [float((out - expected).abs().max()), float((whole - expected).abs().max())]


def lost_track():
    """A worker has forgotten what it holds: that is found out, and a pull brings the values."""
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.set_gradient_compression({"type": "fp16", "leg": "pull"})
    out = torch.zeros(50)
    store.broadcast("x", torch.zeros(50), out)
    for _ in range(2):
        store.pushpull("x", torch.ones(50), out)
    [block] = store.table.blocks.values()
    block.buckets[0].versions.set(0, 50, 1)
    store.push("x", torch.ones(50))
    found = []
    try:
        store.pull("x", out)
    except ProtocolError as error:
        found.append(str(error))
        store.pull("x", out)
    store.pushpull("x", torch.ones(50), out)
    return [*found, out.tolist()]


def errors():
    store = kvstore.create("dist_sync")
    store.init("x", torch.zeros(3))
    doubles = kvstore.create("dist_sync")
    doubles.init("x", torch.zeros(3, dtype=torch.float64))
    store.set_gradient_compression({"type": "int8", "leg": "both"})
    calls = {
        "another codec": lambda: store.set_gradient_compression({"type": "fp16", "leg": "pull"}),
        "half of it": lambda: store.set_gradient_compression({"type": "fp16"}),
        "dtype": lambda: store.init("y", torch.zeros(3, dtype=torch.float16)),
        "dtype before": lambda: doubles.set_gradient_compression({"type": "int8", "leg": "pull"}),
        "leg": lambda: store.set_gradient_compression({"type": "int8", "leg": "pulls"}),
    }
    found = {}
    for what, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            found[what] = [type(error).__name__, str(error)]
    store.set_gradient_compression({"type": "int8", "leg": "pull"})
    out = torch.zeros(3)
    store.pushpull("x", torch.ones(3), out)
    return found | {"after": out.tolist()}


def run_all():
    counting = Counting()
    found = {f"{name} {verb}": arithmetic(name, verb, counting) for name in CODECS for verb in ("pushpull", "push")}
    found |= {kind: descent(kind, counting) for kind in STORES}
    found |= {"lookers-on": lookers_on(), "on the worker": on_the_worker(), "inherited": inherited()}
    return found | {"trainer": by_trainer(), "rows": by_rows(), "lost": lost_track(), "errors": errors()}


# ---- the tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=TRANSPORTS)
def found(request):
    with LocalJob(WORKERS, 2, timeout_s=60, **TRANSPORTS[request.param]) as job:
        return request.param, job.run(run_all, timeout_s=300)


@pytest.mark.parametrize("verb", ["pushpull", "push"])
@pytest.mark.parametrize("name", CODECS)
def test_workers_hold_what_one_process_computes_bit_for_bit(found, name, verb):
    transport, workers = found
    for worker in workers:
        held, coded, same_after_barrier = worker[f"{name} {verb}"]
        assert held == simulate(name)
        assert coded == (0 if transport == "shared memory" else ROUNDS)
        assert same_after_barrier


@pytest.mark.parametrize("kind", STORES)
def test_every_store_trains_with_both_legs_compressed(found, kind):
    transport, workers = found
    for distance, coded, _, _ in (worker[kind] for worker in workers):
        assert distance < (0.01 if kind == "dist_sync" else 0.5)
        assert (coded > 70) == (transport != "shared memory")


@pytest.mark.parametrize(("kind", "unit"), [("dist_sync", [0, 1, 2]), ("dist_gsync", [0, 1])])
def test_workers_that_read_the_same_version_hold_the_same_bits(found, kind, unit):
    """Worker 2 of ``dist_gsync`` is alone in its group: its pull brings what the other group has done since."""
    workers = found[1]
    held = {workers[rank][kind][2] for rank in unit} | {workers[rank][kind][3] for rank in unit}
    assert len(held) == 1


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssync", "dist_ksync"])
def test_plain_pulls_of_a_reader_for_itself_bring_the_values(found, kind):
    assert len({worker[kind][3] for worker in found[1]}) == 1


def test_who_does_not_push_reads_what_others_have_pushed(found):
    assert all(worker["lookers-on"] == [2.0] for worker in found[1])


def test_merged_gradients_are_pulled_compressed_where_the_optimizer_runs_in_the_workers(found):
    assert all(worker["on the worker"][0] < 0.05 for worker in found[1])
    assert len({worker["on the worker"][1] for worker in found[1]}) == 1


def test_an_optimizer_compresses_like_the_store_that_it_is_given(found):
    for worker in found[1]:
        another, codecs, distance, _ = worker["inherited"]
        assert another
        assert codecs == {"push": "2bit", "pull": "int8"}
        assert distance < 0.2
    assert len({worker["inherited"][3] for worker in found[1]}) == 1


def test_trainer_compresses_both_legs(found):
    assert all(worker["trainer"][0] < 0.02 for worker in found[1])
    assert len({worker["trainer"][1] for worker in found[1]}) == 1


def test_rows_travel_as_they_are(found):
    assert all(difference < 1e-6 for worker in found[1] for difference in worker["rows"])


def test_a_worker_that_lost_track_says_so_and_pulls_the_values(found):
    transport, workers = found
    for *errors, values in (worker["lost"] for worker in workers):
        assert values == [12.0] * 50
        assert len(errors) == (transport != "shared memory")
        assert all("push of round 3 at server" in one and "pull their keys" in one for one in errors)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("another codec", "ValueError", "compresses its pull leg with {'type': 'int8'"),
        ("half of it", "ValueError", "compresses its push leg with {'type': 'int8'"),
        ("dtype", "TypeError", "compress pushes only"),
        ("dtype before", "TypeError", "'x' is torch.float64"),
        ("leg", "ValueError", "'push', 'pull' or 'both'"),
    ],
)
def test_wrong_settings_are_refused_with_the_remedy(found, what, kind, words):
    for worker in found[1]:
        assert worker["errors"][what][0] == kind
        assert words in worker["errors"][what][1]
        assert worker["errors"]["after"] == [3.0] * 3
