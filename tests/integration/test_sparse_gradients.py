"""Sparse gradients through the servers, against one process with the joined batch."""

import functools

import pytest
import torch
from torch import nn

from paceline import kvstore
from paceline.optim.sparse_exchange import SparseExchange, find_sparse
from paceline.testing import LocalJob
from paceline.updaters import make_spec, option_groups

STEPS, HEIGHT, WIDTH = 12, 40, 5
PADDING = 3
SAMPLES = (6, 2, 4)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd with momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, lr_decay=0.1),
    "sparseadam": lambda params: torch.optim.SparseAdam(params, lr=0.01, betas=(0.8, 0.95)),
}
IMPOSSIBLE = [("sgd with momentum", "server")]
CASES = [(name, update) for name in OPTIMIZERS for update in ("worker", "server") if (name, update) not in IMPOSSIBLE]
TOLERANCE = {"float32": 1e-6, "float64": 1e-13}
"""Of differences, absolute and relative."""

# ---- what runs in the workers, and in one process -----------------------------------------------------------------


class Words(nn.Module):
    """Two tables and a linear layer; ``rare`` gets a gradient in some steps only, and nowhere in others."""

    def __init__(self, seed, dtype):
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(HEIGHT, WIDTH, padding_idx=PADDING, sparse=True, dtype=dtype)
        self.bags = nn.EmbeddingBag(HEIGHT, WIDTH, mode="sum", sparse=True, dtype=dtype)
        self.rare = nn.Embedding(7, WIDTH, sparse=True, dtype=dtype)
        self.out = nn.Linear(WIDTH, 2, dtype=dtype)

    def forward(self, ids, rare):
        seen = self.words(ids).mean(1) + self.bags(ids)
        if rare is not None:
            seen = seen + self.rare(rare)
        return self.out(torch.tanh(seen))


def batch(number, rank):
    """A worker's samples of one step, with repeated indices and padding.

    Half of the table belongs to one worker alone; some workers use no ``rare`` in a step, and in some steps nobody.
    """
    chance = torch.Generator().manual_seed(100 * number + rank)
    ids = torch.randint(0, HEIGHT // 2, (SAMPLES[rank], 4), generator=chance)
    if rank == 1:
        ids[0] = torch.tensor([HEIGHT - 1, HEIGHT - 1, PADDING, HEIGHT // 2 + number])
    target = torch.randint(0, 2, (SAMPLES[rank],), generator=chance)
    uses_rare = number % 3 and (number + rank) % 2
    rare = torch.randint(0, 7, (SAMPLES[rank],), generator=chance) if uses_rare else None
    return ids, rare, target


def joined_loss(model, number, ranks):
    """Sum over the samples of some workers; the mean over all is this divided by their number."""
    found = []
    for rank in ranks:
        ids, rare, target = batch(number, rank)
        found.append(nn.functional.cross_entropy(model(ids, rare), target, reduction="sum"))
    return torch.stack(found).sum()


def optimizers_of(model, name):
    """The optimizer of the tables, and plain SGD for the rest."""
    tables = [model.words.weight, model.bags.weight, model.rare.weight]
    return OPTIMIZERS[name](tables), torch.optim.SGD(model.out.parameters(), lr=0.1)


def one_process(name, dtype, workers):
    model = Words(0, DTYPES[dtype])
    both = optimizers_of(model, name)
    total = sum(SAMPLES[:workers])
    for number in range(STEPS):
        (joined_loss(model, number, range(workers)) / total).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def train(name, dtype, update, mode="dist_sync"):
    """Train; returns the largest difference to one process, and sums of the weights bit for bit."""
    store = kvstore.create(mode).for_optimizer(True)
    model = Words(store.rank, DTYPES[dtype])
    sparse_one, dense_one = optimizers_of(model, name)
    store.set_spec(make_spec(sparse_one) if update == "server" else make_spec("assign"))
    named = [one for one in model.named_parameters() if not one[0].startswith("out")]
    sparse = find_sparse(named, sparse_one, model)
    assert [one for one, _ in sparse] == ["words.weight", "bags.weight", "rare.weight"]
    exchange = SparseExchange(store, sparse, update)
    rest = kvstore.create(mode).for_optimizer(True)
    dense = dict(model.out.named_parameters())
    rest.broadcast(list(dense), list(map(torch.detach, dense.values())), list(map(torch.detach, dense.values())))
    store.samples = rest.samples = SAMPLES[store.rank]
    for number in range(STEPS):
        (joined_loss(model, number, [store.rank]) / SAMPLES[store.rank]).backward()
        if update == "server":
            store.set_options(option_groups(sparse_one))
        exchange.push_rest(store.carried())
        exchange.settle()
        exchange.take()
        grads = [param.grad for param in dense.values()]
        rest.pushpull(list(dense), grads, grads)
        if update == "worker":
            if number % 3 == 0:
                assert model.rare.weight.grad is None
            assert all(param.grad is None or param.grad.is_coalesced() for _, param in sparse)
            sparse_one.step()
        dense_one.step()
        sparse_one.zero_grad()
        dense_one.zero_grad()
    wanted = one_process(name, dtype, store.num_workers)
    worst = max(
        float(((ours - wanted[key]).abs() / (1 + wanted[key].abs())).max()) for key, ours in model.state_dict().items()
    )
    bits = [one.view(torch.int32 if one.dtype == torch.float32 else torch.int64) for one in model.state_dict().values()]
    return [worst, *(int(one.sum()) for one in bits)]


# ---- the tests ----------------------------------------------------------------------------------------------------

KINDS = {
    "shared memory": {},
    "tcp": {"shared_memory": False, "unix_sockets": False},
}


@functools.cache
def trained(workers, kind):
    """Every combination in one job."""
    with LocalJob(workers, 2, timeout_s=60, **KINDS[kind]) as job:
        return job.run(train_all)


def train_all():
    return {f"{name}, {dtype}, {update}": train(name, dtype, update) for name, update in CASES for dtype in DTYPES}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "update"), CASES)
@pytest.mark.parametrize(("workers", "kind"), [(3, "shared memory"), (2, "tcp")])
def test_sparse_embeddings_train_as_in_one_process(workers, kind, name, dtype, update):
    found = [worker[f"{name}, {dtype}, {update}"] for worker in trained(workers, kind)]
    assert max(worker[0] for worker in found) < TOLERANCE[dtype]
    assert all(worker[1:] == found[0][1:] for worker in found), "the workers' weights differ in a bit"
