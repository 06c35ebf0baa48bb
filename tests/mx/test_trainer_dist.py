"""The trainer over real worker processes, each with two logical devices, against one process with one device."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import kvstore
from paceline.errors import StaleGradientError
from paceline.gluon import Trainer, backward, replicate, split_and_load
from paceline.mx.context import cpu
from paceline.mx.module import Module
from paceline.testing import LocalJob
from paceline.updaters.lamb import LAMB

STEPS, BATCH = 15, 16
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "lamb": (LAMB, {"lr": 0.02, "weight_decay": 0.01}),
}
SCENARIOS = (
    *(f"{name} {where}" for name in OPTIMIZERS for where in ("store", "device")),
    "lazy",
    "rates",
    "multipliers",
    "uneven",
    "embedding",
    "rows",
    "two",
    "keys",
    "clipped",
    "norm_clipped_by_servers",
    "values_clipped_by_servers",
    "group_clipped_by_servers",
    "rows_clipped_by_servers",
    "clipped_alone",
    "weighed",
    "refused",
    "buffers",
    "resumed",
    "module",
    "compressed",
    "stale",
)

# ---- what runs in the workers -------------------------------------------------------------------------------------


def mlp(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


class Ids(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.out = nn.Embedding(12, 6, sparse=sparse), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(self.embed(x).mean(1)).flatten()


def batch(step, ids=False):
    chance = torch.Generator().manual_seed(step)
    data = torch.randint(0, 12, (BATCH, 3), generator=chance) if ids else torch.randn(BATCH, 6, generator=chance)
    return data, torch.randn(BATCH, generator=chance)


def plain_step(net, optimizer, step, ids=False):
    data, label = batch(step, ids)
    optimizer.zero_grad()
    (net(data) - label).square().mean().backward()
    optimizer.step()


def my_gradients(net, store, step, ids=False):
    """Go backward on this worker's part of the batch; returns how many samples are in the whole batch."""
    data, label = (one.chunk(store.num_workers)[store.rank] for one in batch(step, ids))
    outputs, labels = net(split_and_load(data, net.contexts)), split_and_load(label, net.contexts)
    backward([(out - want).square().sum() for out, want in zip(outputs, labels, strict=True)])
    return BATCH


def difference(net, reference):
    replicas = [value for replica in net.replicas for value in replica.parameters()]
    wanted = [*reference.parameters()] * len(net.replicas)
    return max(float((one - other).detach().abs().max()) for one, other in zip(replicas, wanted, strict=True))


def two_replicas(net):
    return replicate(net, [cpu(0), cpu(1)])


def train(name, where, store):
    cls, options = OPTIMIZERS[name]
    reference = mlp()
    # Every worker starts from other weights: the store has to hand out those of rank 0.
    net = two_replicas(copy.deepcopy(reference) if store.rank == 0 else mlp(seed=7))
    trainer = Trainer(net, name, options, store, update_on_kvstore=where == "store")
    optimizer = cls(reference.parameters(), **options)
    for step in range(STEPS):
        trainer.step(my_gradients(net, store, step))
        plain_step(reference, optimizer, step)
    assert trainer.update_on_kvstore is (where == "store")
    return difference(net, reference)


def lazy(store):
    """The first gradients of a lazy network too must be those of rank 0's weights."""
    torch.manual_seed(1 + store.rank)
    net = two_replicas(nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1), nn.Flatten(0)))
    trainer = Trainer(net, "sgd", {"lr": 0.1}, store)
    net.infer_shapes(batch(0)[0])
    reference = copy.deepcopy(net.replicas[0])
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(STEPS):
        trainer.step(my_gradients(net, store, step))
        plain_step(reference, optimizer, step)
    return difference(net, reference)


def rates(store):
    reference, net = mlp(), two_replicas(mlp())
    net.collect_params()["0.weight"].lr_mult = 0.5
    trainer = Trainer(net, "sgd", {"lr": 0.1, "momentum": 0.9}, store)
    optimizer = torch.optim.SGD([{"params": [one]} for one in reference.parameters()], lr=0.1, momentum=0.9)
    for step in range(STEPS):
        rate = 0.1 if step < 5 else 0.02
        trainer.set_learning_rate(rate)
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = rate * (0.5 if index == 0 else 1.0)
        trainer.step(my_gradients(net, store, step) * (1 + step % 2))
        data, label = batch(step)
        optimizer.zero_grad()
        ((reference(data) - label).square().mean() / (1 + step % 2)).backward()
        optimizer.step()
    return difference(net, reference)


def multipliers(store):
    """Multipliers that change before the first step, between steps and back again count from the next step on."""
    reference, net = mlp(), two_replicas(mlp())
    trainer = Trainer(net, "adam", {"lr": 0.02, "weight_decay": 0.1}, store)
    groups = [{"params": [one]} for one in reference.parameters()]
    optimizer = torch.optim.Adam(groups, lr=0.02, weight_decay=0.1)
    weight, bias = net.collect_params()["0.weight"], net.collect_params()["2.bias"]
    for step in range(STEPS):
        if step in (0, 5, 10):
            weight.lr_mult, bias.wd_mult = {0: (0.5, 1.0), 5: (1.0, 0.0), 10: (1.0, 1.0)}[step]
        for group, one in zip(optimizer.param_groups, net.collect_params().values(), strict=True):
            group["lr"], group["weight_decay"] = 0.02 * one.lr_mult, 0.1 * one.wd_mult
        trainer.step(my_gradients(net, store, step))
        plain_step(reference, optimizer, step)
    assert trainer.update_on_kvstore
    return difference(net, reference)


def uneven(store, **options):
    """With a store that merges to the mean, workers with 12 and 4 samples make the mean over all 16."""
    reference, net = mlp(), two_replicas(mlp())
    trainer = Trainer(net, "sgd", {"lr": 0.1}, kvstore.create("dist_sync", mean=True), **options)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(STEPS):
        data, label = (one.split([12, 4] if store.num_workers == 2 else [16])[store.rank] for one in batch(step))
        outputs, labels = net(split_and_load(data, net.contexts)), split_and_load(label, net.contexts)
        backward([(out - want).square().sum() for out, want in zip(outputs, labels, strict=True)])
        trainer.step(len(label))
        plain_step(reference, optimizer, step)
    return difference(net, reference)


def embedding(store):
    reference, net = Ids(sparse=False), two_replicas(Ids(sparse=True))
    trainer = Trainer(net, "sgd", {"lr": 0.1}, store)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(STEPS):
        trainer.step(my_gradients(net, store, step, ids=True))
        plain_step(reference, optimizer, step, ids=True)
    return difference(net, reference)


LAZY = [
    ("sgd", {"lr": 0.1, "momentum": 0.9, "wd": 0.1}),
    ("adam", {"lr": 0.05, "wd": 0.1, "lazy_update": True}),
    ("ftrl", {"lr": 0.1, "wd": 0.1}),
]


def rows(store):
    """Rows are updated lazily on servers as they are in one process; the joined batch is the measure."""
    found = []
    for name, options in LAZY:
        net, reference = two_replicas(Ids(sparse=True)), replicate(Ids(sparse=True), cpu(0))
        trainer, alone = Trainer(net, name, options, store), Trainer(reference, name, options, None)
        assert trainer.update_on_kvstore
        for step in range(STEPS):
            trainer.step(my_gradients(net, store, step, ids=True))
            data, label = batch(step, ids=True)
            (reference(data) - label).square().sum().backward()
            alone.step(BATCH)
        found.append(difference(net, reference.replicas[0]))
    return max(found)


def two(store):
    """Two networks with parameters of the same names and a trainer each, on one store, and a number beside them."""
    store.init(7, torch.zeros(2))
    optimizers, trainers, nets, references = [], [], [], [mlp(1), mlp(2)]
    choices = [("adam", {"lr": 0.01}, True), ("sgd", {"lr": 0.1}, False)]
    for reference, (name, options, on_store) in zip(references, choices, strict=True):
        nets.append(two_replicas(copy.deepcopy(reference) if store.rank == 0 else mlp(seed=7)))
        trainers.append(Trainer(nets[-1], name, options, store, update_on_kvstore=on_store))
        optimizers.append(OPTIMIZERS[name][0](reference.parameters(), **options))
    for step in range(STEPS):
        for net, trainer, reference, optimizer in zip(nets, trainers, references, optimizers, strict=True):
            trainer.step(my_gradients(net, store, step))
            plain_step(reference, optimizer, step)
        store.push(7, torch.ones(2))
    store.pull(7, out := torch.empty(2))
    beside = float((out - store.num_workers).abs().max())
    return max(beside, *(difference(net, reference) for net, reference in zip(nets, references, strict=True)))


def keys(store):
    """A trainer takes the store by itself; then the script's own keys are numbers, and names."""
    own, net = kvstore.create("dist_sync"), two_replicas(mlp())
    trainer = Trainer(net, "sgd", {"lr": 0.1}, own, update_on_kvstore=False)
    wrong = 0.0
    for step in range(2):
        trainer.step(my_gradients(net, store, step))
        if not step:
            own.init([0, 1], [torch.zeros(2)] * 2)
            own.init("own", torch.zeros(2))
        for key in (1, "own"):
            own.push(key, torch.ones(2))
            own.pull(key, out := torch.empty(2))
            wrong = max(wrong, float((out - store.num_workers).abs().max()))
    return wrong if trainer.kvstore is own else -1.0


def clipped(store):
    """The norm is that of the merged gradient, so all workers clip by the same factor."""
    reference, net = mlp(), two_replicas(mlp())
    trainer = Trainer(net, "adam", {"lr": 0.01}, store, clip_grad_norm=0.2, clip_grad_value=0.1)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
    assert not trainer.update_on_kvstore
    for step in range(STEPS):
        trainer.step(my_gradients(net, store, step))
        data, label = batch(step)
        optimizer.zero_grad()
        (reference(data) - label).square().mean().backward()
        nn.utils.clip_grad_value_(reference.parameters(), 0.1)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.2)
        optimizer.step()
    return difference(net, reference)


def in_one_group(store, **options):
    return kvstore.create("dist_gsync", groups=[list(range(store.num_workers))], **options)


def bounded(store, mean, clip, rows=False, **bound):
    """Training where servers clip, with 12 and 4 samples, against torch's ``clip`` with all 16."""
    reference, net = (Ids(False), two_replicas(Ids(True))) if rows else (mlp(), two_replicas(mlp()))
    options = {"lr": 0.1} if rows else {"lr": 0.1, "momentum": 0.9}
    trainer = Trainer(net, "sgd", options, mean, update_on_kvstore=True, **bound)
    optimizer = torch.optim.SGD(reference.parameters(), **options)
    for step in range(10):
        data, label = (one.split([12, 4] if store.num_workers == 2 else [16])[store.rank] for one in batch(step, rows))
        outputs, labels = net(split_and_load(data, net.contexts)), split_and_load(label, net.contexts)
        backward([(out - want).square().sum() for out, want in zip(outputs, labels, strict=True)])
        trainer.step(len(label))
        data, label = batch(step, rows)
        optimizer.zero_grad()
        (reference(data) - label).square().mean().backward()
        before = [one.grad.clone() for one in reference.parameters()]
        clip(reference.parameters(), *bound.values())
        assert not all(map(torch.equal, before, [one.grad for one in reference.parameters()])), "the bound is reached"
        optimizer.step()
    assert trainer.update_on_kvstore
    return difference(net, reference)


def norm_clipped_by_servers(store):
    return bounded(store, kvstore.create("dist_sync", mean=True), nn.utils.clip_grad_norm_, clip_grad_norm=0.2)


def values_clipped_by_servers(store):
    return bounded(store, kvstore.create("dist_sync", mean=True), nn.utils.clip_grad_value_, clip_grad_value=0.03)


def group_clipped_by_servers(store):
    return bounded(store, in_one_group(store, mean=True), nn.utils.clip_grad_norm_, clip_grad_norm=0.2)


def rows_clipped_by_servers(store):
    """Rows count in the norm, those of several workers as their sum."""
    mean = kvstore.create("dist_sync", mean=True)
    return bounded(store, mean, nn.utils.clip_grad_norm_, rows=True, clip_grad_norm=0.1)


def clipped_alone(store):
    """Where pushes are not merged, every worker's own gradient, summed over its devices, is clipped."""
    reference, net = Ids(False), two_replicas(Ids(True))
    start = copy.deepcopy(reference)
    trainer = Trainer(net, "sgd", {"lr": 1.0}, "dist_async", clip_grad_norm=0.2, clip_grad_value=0.05)
    store.barrier()  # In dist_async a worker that starts late gets weights that the first one has already stepped.
    optimizer = torch.optim.SGD(reference.parameters(), lr=1.0)
    for data, label in zip(*(one.chunk(store.num_workers) for one in batch(0, ids=True)), strict=True):
        start.zero_grad()
        (start(data) - label).square().mean().backward()
        nn.utils.clip_grad_value_(start.parameters(), 0.05)
        nn.utils.clip_grad_norm_(start.parameters(), 0.2)
        for one, other in zip(reference.parameters(), start.parameters(), strict=True):
            one.grad = other.grad.clone()
        optimizer.step()
    my_gradients(net, store, 0, ids=True)
    trainer.step(BATCH / store.num_workers)
    store.barrier()
    keys = net.collect_params()
    trainer.kvstore.pull(list(keys), [one.list_data() for one in keys.values()])
    return difference(net, reference)


def weighed(store):
    """In a store that merges to the mean, 12 and 4 samples make the mean over all 16 where the workers update too."""
    return uneven(store, update_on_kvstore=False)


def buffers(store):
    """Running statistics after training: of this worker while it trains, rank 0's when they are read."""
    torch.manual_seed(1)
    net = two_replicas(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Flatten(0)))
    trainer = Trainer(net, "sgd", {"lr": 0.01}, store)
    for step in range(3):
        trainer.step(my_gradients(net, store, step))
    store.barrier()
    mine = torch.stack([replica[1].running_mean for replica in net.replicas]).mean(0).tolist()
    saved = net.state_dict()["1.running_mean"].tolist()
    net.eval()
    read = [(replica[1].running_mean.tolist(), int(replica[1].num_batches_tracked)) for replica in net.replicas]
    net.train()
    store.barrier()
    trainer.step(my_gradients(net, store, 3))
    net.eval()
    return {"mine": mine, "saved": saved, "read": read, "again": net.replicas[1][1].running_mean.tolist()}


def refused(store):
    found = []
    both = {"clip_grad_norm": 1.0, "clip_grad_value": 1.0}
    choices = [
        (False, store, both | {"update_on_kvstore": True}),
        (True, store, {"update_on_kvstore": False}),
        (True, in_one_group(store), {"clip_grad_norm": 1.0}),
    ]
    for sparse, where, options in choices:
        try:
            Trainer(two_replicas(Ids(sparse)), "sgd", {"lr": 0.1}, where, **options)
        except ValueError as error:
            found.append(str(error))
    return found


def resumed(store):
    reference, net = mlp(), two_replicas(mlp())
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
    trainer = Trainer(net, "adam", {"lr": 0.01}, store)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(STEPS):
            plain_step(reference, optimizer, step)
            trainer.step(my_gradients(net, store, step))
            if step == 5:
                path = Path(folder) / "states"
                trainer.save_states(path)
                store.barrier()
                store = kvstore.create("dist_sync")
                net = two_replicas(copy.deepcopy(net.replicas[0]))
                trainer = Trainer(net, "adam", {"lr": 0.01}, store)
                trainer.load_states(path)
    return difference(net, reference)


def module(store):
    """Module divides by the samples of all workers, whose batches together are the batch of one process."""

    def squared(output, label):
        return (output - label).square()

    options = {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01}, "eval_metric": (), "num_epoch": 3}
    whole = [batch(step) for step in range(10)]
    mine = [tuple(one.chunk(store.num_workers)[store.rank] for one in pair) for pair in whole]
    together = Module(mlp(seed=1 + store.rank), [cpu(0), cpu(1)], [3, 1], loss=squared)
    together.fit(mine, kvstore=store, **options)
    alone = Module(mlp(), loss=squared)
    alone.fit(whole, kvstore=None, **options)
    return difference(together.net, alone.net.replicas[0])


def compressed(store):
    """How far from the solution of a linear problem training ends, starting from a distance of 3."""
    solution, data = torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    net = two_replicas(nn.Linear(4, 1, bias=False))
    trainer = Trainer(net, "sgd", {"lr": 0.02}, store, compression_params={"type": "2bit", "threshold": 2.0})
    for _ in range(200):
        points = split_and_load(data.chunk(store.num_workers)[store.rank], net.contexts)
        outputs = [
            (out.flatten() - part @ solution).square().sum() for out, part in zip(net(points), points, strict=True)
        ]
        backward(outputs)
        trainer.step(64)
    return float((net.replicas[1].weight.flatten() - solution).abs().max().detach())


def stale(store):
    net = two_replicas(mlp())
    trainer = Trainer(net, "sgd", {"lr": 0.05}, store)
    trainer.step(my_gradients(net, store, 0))
    try:
        trainer.step(BATCH)
    except StaleGradientError as error:
        return str(error)
    return "no error"


def run_scenarios():
    results = {}
    for scenario in SCENARIOS:
        name, _, where = scenario.partition(" ")
        store = kvstore.create("dist_sync")
        results[scenario] = train(name, where, store) if where else globals()[name](store)
    return results


# ---- the tests ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2])
def results(request):
    with LocalJob(num_workers=request.param, num_servers=2) as job:
        return job.run(run_scenarios)


@pytest.mark.parametrize(
    "scenario", [one for one in SCENARIOS if one not in ("compressed", "stale", "refused", "buffers")]
)
def test_workers_with_two_devices_train_like_one_device(results, scenario):
    for result in results:
        assert result[scenario] < 1e-5


@pytest.mark.parametrize("scenario", [one for one in SCENARIOS if one.endswith("by_servers")] + ["clipped_alone"])
def test_servers_and_workers_clip_as_torch_does(results, scenario):
    for result in results:
        assert result[scenario] < 1e-6


def test_compression_trains_over_workers(results):
    assert all(result["compressed"] < 0.2 for result in results)


def test_stale_gradients_are_found_before_anything_is_sent(results):
    assert all("no gradient since the last step" in result["stale"] for result in results)


def test_impossible_places_of_the_update_are_refused_with_the_way_out(results):
    for result in results:
        clip, rows, groups = result["refused"]
        assert "Give one of them, or let the workers update" in clip
        assert "use sparse=False for embeddings" in groups
        assert "row-sparse gradients of several workers are merged where a dist_sync store updates" in rows


def test_buffers_are_rank_0s_when_they_are_read(results):
    first = results[0]["buffers"]
    assert len({tuple(result["buffers"]["mine"]) for result in results}) == len(results)
    for result in results:
        found = result["buffers"]
        assert found["saved"] == pytest.approx(first["mine"])
        if len(results) > 1 and result is not results[0]:
            assert all(mean == pytest.approx(first["mine"]) and batches == 3 for mean, batches in found["read"])
        assert found["again"] != pytest.approx(found["saved"])
