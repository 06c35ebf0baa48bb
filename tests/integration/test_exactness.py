"""Lock-step training over real processes against one process that sees the whole batch."""

import functools
import hashlib
import math
from pathlib import Path

import pytest
import torch

from paceline import DistributedOptimizer, kvstore
from paceline.kvstore.checkpoint import optimizer_states as state_files
from paceline.optim import LAMB
from paceline.testing import LocalJob

STEPS, BATCH = 20, 64
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
VARIANTS = tuple(f"{name} server" for name in OPTIMIZERS)
#: What the loops of ``tests/oracle`` do not have.
FEATURES = ("scaler", "kept state", "lamb", "reduction sum")


# ---- what runs in the workers: every scenario returns (largest difference to one process, digest of the weights) ---


def new_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 20, generator=generator)
    return inputs, torch.randint(0, 5, (BATCH,), generator=generator)


def new_optimizer(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
    if name == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=3e-3)
    if name == "lamb":
        return LAMB(model.parameters(), lr=1e-2, weight_decay=0.01)
    return torch.optim.AdamW(
        [
            {"params": list(model[0].parameters()), "lr": 1e-2, "weight_decay": 0.1},
            {"params": list(model[2].parameters()), "lr": 2e-3, "weight_decay": 0.0},
        ]
    )


def new_schedule(name, optimizer):
    adamw = name == "adamw"
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) if adamw else None


def loss_of(model, inputs, targets):
    return torch.nn.functional.cross_entropy(model(inputs), targets)


def train(model, optimizer, steps, part=slice(None), schedule=None):
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss_of(model, inputs[part], targets[part]).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


@functools.cache
def alone(name, steps=range(STEPS)):
    """Return a model that one process trained with whole batches."""
    model = new_model(0)
    optimizer = new_optimizer(name, model)
    train(model, optimizer, steps, schedule=new_schedule(name, optimizer))
    return model


def compare(model, reference):
    """Return the largest difference between the weights of two models, and a digest of the first one's."""
    ours, theirs = (torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in (model, reference))
    digest = hashlib.sha256(ours.numpy().tobytes()).hexdigest()
    return (ours - theirs).abs().max().item(), digest


def my_part(sizes, rank):
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def wrapped(name, rank):
    """A model with this worker's own weights, in an optimizer that brings rank 0's."""
    model = new_model(rank)
    return model, DistributedOptimizer(new_optimizer(name, model), "dist_sync", model=model, update="server")


def train_variant(rank, variant):
    name, _ = variant.split()
    model, optimizer = wrapped(name, rank)
    train(model, optimizer, range(STEPS), my_part((32, 32), rank), new_schedule(name, optimizer))
    return compare(model, alone(name))


def train_scaler(rank):
    """Worker 1 overflows at step 3: no worker takes that step."""
    overflow = 3
    model, optimizer = wrapped("adam", rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    part = my_part((32, 32), rank)
    for step in range(10):
        inputs, targets = (whole[part] for whole in batch(step))
        optimizer.zero_grad()
        factor = math.inf if (rank, step) == (1, overflow) else 1.0
        scaler.scale(loss_of(model, inputs, targets) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    reference = new_model(0)
    inner = new_optimizer("adam", reference)
    for step in range(10):
        if step != overflow:
            train(reference, inner, [step])
    return compare(model, reference)


def train_kept_state(rank):
    model = new_model(0)
    inner = new_optimizer("adam", model)
    train(model, inner, range(10))
    optimizer = DistributedOptimizer(inner, "dist_sync", model=model, update="server")
    train(model, optimizer, range(10, 20), my_part((32, 32), rank))
    return compare(model, alone("adam", range(20)))


def train_lamb(rank):
    model, optimizer = wrapped("lamb", rank)
    train(model, optimizer, range(20), my_part((32, 32), rank))
    return compare(model, alone("lamb", range(20)))


def train_reduction_sum(rank):
    """The sum over workers of the means over 32 samples is twice the mean over 64: half the rate undoes it."""
    model = new_model(rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.0)
    optimizer = DistributedOptimizer(inner, "dist_sync", model=model, reduction="sum")
    train(model, optimizer, range(20), my_part((32, 32), rank))
    reference = new_model(0)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), range(20))
    return compare(model, reference)


FEATURE_FUNCTIONS = {
    "scaler": train_scaler,
    "kept state": train_kept_state,
    "lamb": train_lamb,
    "reduction sum": train_reduction_sum,
}


def train_then_save(rank, folder):
    """Ten steps of Adam; the optimizer's state and the weights go to disk."""
    model, optimizer = wrapped("adam", rank)
    train(model, optimizer, range(10), my_part((32, 32), rank))
    if rank == 0:
        optimizer.kvstore.save_optimizer_states(f"{folder}/states", dump_optimizer=True)
        torch.save(model.state_dict(), f"{folder}/weights")
    optimizer.kvstore.barrier()


def load_then_train(rank, folder):
    model = new_model(rank)
    model.load_state_dict(torch.load(f"{folder}/weights", weights_only=True))
    optimizer = DistributedOptimizer(new_optimizer("adam", model), "dist_sync", model=model, update="server")
    optimizer.kvstore.load_optimizer_states(f"{folder}/states")
    train(model, optimizer, range(10, 20), my_part((32, 32), rank))
    return compare(model, alone("adam", range(20)))


def run_on_three_servers(folder):
    """Everything, in one job: variants and features."""
    rank = kvstore.create("dist_sync").rank
    found = {variant: train_variant(rank, variant) for variant in VARIANTS}
    found |= {feature: FEATURE_FUNCTIONS[feature](rank) for feature in FEATURES}
    train_then_save(rank, folder)
    return found


def run_on_one_server(folder):
    rank = kvstore.create("dist_sync").rank
    found = {variant: train_variant(rank, variant) for variant in VARIANTS}
    return found | {"loaded": load_then_train(rank, folder)}


def run_same_bits():
    rank = kvstore.create("dist_sync").rank
    return {variant: train_variant(rank, variant) for variant in VARIANTS}


# ---- the tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def three_servers(folder):
    # A bound this low cuts the larger keys over all servers.
    with LocalJob(2, 3, bigarray_bound=320, timeout_s=60) as job:
        return job.run(run_on_three_servers, folder, timeout_s=150)


@pytest.fixture(scope="module")
def one_server(folder, three_servers):
    with LocalJob(2, 1, bigarray_bound=320, timeout_s=60) as job:
        return job.run(run_on_one_server, folder)


@pytest.mark.parametrize("scenario", [*VARIANTS, *FEATURES])
def test_two_workers_equal_one_process_with_the_whole_batch(three_servers, scenario):
    for difference, _ in (worker[scenario] for worker in three_servers):
        assert difference <= 1e-5
    assert three_servers[0][scenario][1] == three_servers[1][scenario][1], "workers differ"


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_and_three_servers_give_the_same_bits(three_servers, one_server, variant):
    assert one_server[0][variant][1] == three_servers[0][variant][1]


def test_shared_memory_and_sockets_give_the_same_bits(three_servers):
    with LocalJob(2, 3, bigarray_bound=320, timeout_s=60, shared_memory=False) as job:
        found = job.run(run_same_bits)
    assert {name: one[1] for name, one in found[0].items()} == {name: three_servers[0][name][1] for name in VARIANTS}
    assert all(difference <= 1e-5 for worker in found for difference, _ in worker.values())


def test_optimizer_state_of_three_servers_goes_on_at_one(one_server):
    assert all(worker["loaded"][0] <= 1e-5 for worker in one_server)


def test_saved_states_hold_every_key_whole(folder, three_servers):
    states = state_files.load(None, Path(folder) / "states", everywhere=True).states
    shapes = {name: tensor["exp_avg"].numel() for name, tensor in states.items()}
    assert shapes == {name: parameter.numel() for name, parameter in new_model(0).named_parameters()}
