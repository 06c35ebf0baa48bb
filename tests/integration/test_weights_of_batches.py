"""How much a worker's batch weighs: by its samples where their number is known, else as with DDP, and lines say so.

Every row of the table at the bottom is a habit of a PyTorch script. Two workers train; the weights must be those of one
process that trains on both batches: on the mean over all samples, or on the mean of both workers' losses.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline
from paceline import DistributedOptimizer
from paceline.data import ShardedSampler, batches
from paceline.membership.told_steps import ToldSteps
from paceline.testing import LocalJob, tell
from paceline.wire import messages as m
from tests.hvd.ranks import run as run_ranks

WORKERS, STEPS, FEATURES, CLASSES = 2, 3, 5, 3
Batch = tuple[Any, ...]


def drawn(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * step + rank)


def unequal(step: int, rank: int) -> int:
    return (3, 5)[rank] + step


def labelled(step: int, rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = drawn(step, rank)
    x = torch.randn(count, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(20, 6), nn.Linear(6, CLASSES)

    def forward(self, text: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(text, offsets))


class Recurrent(nn.Module):
    """Takes sequences, packed or [T, B, F], and a first state or none."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(FEATURES, 6), nn.Linear(6, CLASSES)

    def forward(self, first: Any, second: Any = None) -> torch.Tensor:
        last = self.rnn(first)[1] if second is None else self.rnn(second, first)[1]
        return self.out(last[-1])


class Graph(nn.Module):
    """Takes the nodes of all graphs of a batch, their edges, and to which graph each node belongs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        mixed = nodes.index_add(0, edges[0], nodes[edges[1]])
        return self.out(torch.zeros(int(graph.max()) + 1, FEATURES).index_add(0, graph, mixed))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)


class Twins(Net):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        return {"loss": F.cross_entropy(self.net(input_ids * attention_mask), labels)}


class Detector(nn.Module):
    """Takes images of unlike sizes in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, CLASSES)

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        return self.out(torch.stack([one.mean((1, 2)) for one in images]))


@dataclass
class Row:
    """A habit.

    Attributes:
        model: makes the network.
        batch: the batch of a step and a worker; its length is in ``count``.
        loss: mean over the samples of a batch.
        count: samples of a step and a worker.
        weighs: by ``samples``, or ``equally``.
        says: a line warns that inputs are unequal.
        steps: how many it makes.
        grows: a line warns that its losses grow with the batch.
        options: of the optimizer.
        train: one step, if not the usual one.
        batches: this worker's batches, if they come from a loader.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[..., torch.Tensor]
    count: Callable[[int, int], int] = unequal
    weighs: str = "equally"
    says: bool = True
    steps: int = STEPS
    grows: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    train: Callable[[Row, nn.Module, Any, Batch], None] | None = None
    batches: Callable[[int], Iterator[Batch]] | None = None


# ---- batches -----------------------------------------------------------------------------------------------------


def same(step: int, rank: int) -> int:
    return 4


def bags(step: int, rank: int, count: int) -> Batch:
    generator = drawn(step, rank)
    sizes = torch.randint(1, 6, (count,), generator=generator)
    sizes[0] += rank
    text = torch.randint(20, (int(sizes.sum()),), generator=generator)
    return text, sizes.cumsum(0) - sizes, torch.randint(CLASSES, (count,), generator=generator)


def packed(step: int, rank: int, count: int) -> Batch:
    generator = drawn(step, rank)
    parts = [torch.randn(2 + (one + rank) % 3, FEATURES, generator=generator) for one in range(count)]
    return pack_sequence(parts, enforce_sorted=False), torch.randint(CLASSES, (count,), generator=generator)


def padded(step: int, rank: int, count: int) -> Batch:
    generator = drawn(step, rank)
    x = torch.randn(6 + rank, count, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def with_state(step: int, rank: int, count: int) -> Batch:
    return (torch.zeros(1, count, 6), *padded(step, 0, count))


def graphs(step: int, rank: int, count: int) -> Batch:
    generator = drawn(step, rank)
    graph = torch.arange(count).repeat_interleave(3 + rank)
    nodes = torch.randn(len(graph), FEATURES, generator=generator)
    edges = torch.randint(len(graph), (2, 9), generator=generator)
    return nodes, edges, graph, torch.randint(CLASSES, (count,), generator=generator)


def images(step: int, rank: int, count: int) -> Batch:
    generator = drawn(step, rank)
    found = [torch.rand(3, 4 + one % 2, 5, generator=generator) for one in range(count)]
    return found, torch.randint(CLASSES, (count,), generator=generator)


def half(step: int, rank: int) -> int:
    return (3, 6)[rank]


def empty_at_the_end(step: int, rank: int) -> int:
    return 0 if rank and step else 4


DATA = TensorDataset(*labelled(0, 0, 13))


def by_loader(rank: int, loader: Callable[[int], Any]) -> Iterator[Batch]:
    yield from loader(rank)


def sharded(rank: int, even: bool = False) -> ShardedSampler:
    return ShardedSampler(DATA, WORKERS, rank, even=even, seed=3)


def loaded(rank: int) -> Any:
    return DataLoader(DATA, batch_size=4, sampler=sharded(rank))


def by_torchs_sampler(rank: int) -> Any:
    return DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, WORKERS, rank, shuffle=False))


def from_memory(rank: int) -> Any:
    return batches(DATA, sharded(rank), 4)


# ---- steps and losses --------------------------------------------------------------------------------------------


def classify(model: nn.Module, *batch: Any) -> torch.Tensor:
    *inputs, labels = batch
    return F.cross_entropy(model(*inputs), labels)


def by_forward(model: nn.Module, *batch: Any) -> torch.Tensor:
    *inputs, labels = batch
    return F.cross_entropy(model.forward(*inputs), labels)


def by_method(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model.loss(x, y)


def one_by_one(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return sum(F.cross_entropy(model(one[None]), label[None]) for one, label in zip(x, y, strict=True)) / len(y)


def of_two_heads(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    outputs = model(x)
    some = y.masked_fill(torch.arange(len(y)) % 2 == 0, -100)
    return F.cross_entropy(outputs, y) + F.cross_entropy(outputs.flip(1), some)


def of_words_and_a_text(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    outputs, words = model(x), 1 + y
    return (F.cross_entropy(outputs, y, reduction="none") * words).sum() / words.sum() + outputs.square().mean()


def of_positives(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    outputs = model(x)
    positive = outputs[x[:, 0] > 0.5]
    loss = F.cross_entropy(outputs, y)
    return loss + positive.square().mean() if len(positive) else loss


def of_a_drawn_task(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y) if x[0, 0] > 0 else F.l1_loss(model(x), x[:, :CLASSES])


def of_hard_triplets(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Nothing is left of easy batches, and then the loss is zero."""
    outputs = model(x)
    apart = (outputs - outputs.roll(1, 0)).square().sum(1) - (outputs - outputs.roll(2, 0)).square().sum(1)
    hard = apart[apart > 0.3]
    return hard.mean() if len(hard) else 0.0 * outputs.sum()


class Chunked(torch.autograd.Function):
    """A cross entropy whose node does not show its labels."""

    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = outputs.detach().requires_grad_()
            loss = F.cross_entropy(inner, y)
            ctx.save_for_backward(*torch.autograd.grad(loss, inner))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.saved_tensors[0], None


def in_a_function(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return Chunked.apply(model(x), y)


def traced(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.fx.symbolic_trace(model)(x), y)


def by_parts(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model["head"](model["body"](x)), y)


def by_keyword(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    batch = {"input_ids": x, "attention_mask": (x > -1).float(), "labels": y}
    return model(**batch)["loss"]


def of_two_views(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), model(x.flip(1))) + F.cross_entropy(model(x), y)


def by_grad(row: Row, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(row.loss(model, *batch), params), strict=True):
        param.grad = grad
    optimizer.step()


def if_there_is_any(row: Row, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    if len(batch[-1]):
        row.loss(model, *batch).backward()
    optimizer.step()


def told(row: Row, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    if hasattr(optimizer, "samples"):
        optimizer.samples = len(batch[-1])
    usual(row, model, optimizer, batch)


def in_two_parts(row: Row, model: nn.Module, optimizer: Any, batch: Batch, zeroing: Any = None) -> None:
    (zeroing or optimizer).zero_grad()
    cuts = [one.tensor_split([2]) for one in batch]
    for part in zip(*cuts, strict=True):
        (row.loss(model, *part) * (len(part[-1]) / len(batch[-1]))).backward()
    optimizer.step()


def after_a_probe(row: Row, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    """Goes backward, and drops that through the model: as loops that leave a step out, and those of two networks."""
    row.loss(model, *(one[:2] for one in batch)).backward()
    model.zero_grad(set_to_none=bool(len(batch[-1]) % 2))
    in_two_parts(row, model, optimizer, batch, model)


def instead_of_an_empty_batch(row: Row, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    """Drops gradients through the model where the worker is to add nothing, and steps with the others."""
    is_empty = not len(batch[-1])
    row.loss(model, *(labelled(9, 0, 2) if is_empty else batch)).backward()
    if is_empty:
        model.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def usual(row: Row, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    row.loss(model, *batch).backward()
    optimizer.step()


def halves() -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(FEATURES, 6), "head": nn.Linear(6, CLASSES)})


EXACT: dict[str, Any] = {"weighs": "samples", "says": False}

ROWS: dict[str, Row] = {
    "embedding bags": Row(Bag, bags, classify, same),
    "packed sequences": Row(Recurrent, packed, classify),
    "packed sequences, with batch_dim": Row(Recurrent, packed, classify, **EXACT, options={"batch_dim": 0}),
    "packed sequences, as many": Row(Recurrent, packed, classify, same),
    "nodes of graphs": Row(Graph, graphs, classify, same),
    "time first, padded per batch": Row(Recurrent, padded, classify, same),
    "time first, with batch_dim": Row(Recurrent, padded, classify, **EXACT, options={"batch_dim": 1}),
    "model.loss(x)": Row(Net, labelled, by_method, says=False),
    "model.forward(x)": Row(Net, labelled, by_forward, says=False),
    "autograd.grad": Row(Net, labelled, classify, train=by_grad, says=False),
    "autograd.grad, told": Row(
        Net, labelled, classify, **EXACT, options={"samples": 1},
        train=lambda row, model, optimizer, batch: (
            setattr(optimizer, "samples", len(batch[-1])), by_grad(row, model, optimizer, batch)
        )[1],
    ),
    "traced": Row(Net, labelled, traced, says=False),
    "a ModuleDict": Row(halves, labelled, by_parts, says=False),
    "lists of images": Row(Detector, images, classify),
    "rnn(h0, x)": Row(Recurrent, with_state, classify),
    "rnn(h0, x), with batch_dim": Row(Recurrent, with_state, classify, **EXACT, options={"batch_dim": 1}),
    "an empty batch": Row(Net, labelled, classify, empty_at_the_end, says=False),
    "an empty batch that is left out": Row(
        Net, labelled, classify, empty_at_the_end, says=False, train=if_there_is_any
    ),
    "plain unequal batches": Row(Net, labelled, classify),
    "plain batches, as many": Row(Net, labelled, classify, same, says=False),
    "plain unequal batches, told": Row(Net, labelled, classify, **EXACT, train=told),
    "plain unequal batches, with batch_dim": Row(
        Net, labelled, classify, **EXACT, options={"batch_dim": 0}
    ),
    "model(**batch)": Row(Twins, labelled, by_keyword),
    "model(**batch), with batch_dim": Row(Twins, labelled, by_keyword, **EXACT, options={"batch_dim": 0}),
    "several calls": Row(Net, labelled, of_two_views, **EXACT, options={"batch_dim": 0}),
    "accumulation": Row(
        Net, labelled, classify, **EXACT, train=in_two_parts,
        options={"batch_dim": 0, "backward_passes_per_step": 2},
    ),
    "accumulation after a probe": Row(
        Net, labelled, classify, **EXACT, train=after_a_probe,
        options={"batch_dim": 0, "backward_passes_per_step": 2},
    ),
    "accumulation after a probe, pushed late": Row(
        Net, labelled, classify, **EXACT, train=after_a_probe,
        options={"batch_dim": 0, "backward_passes_per_step": 2, "overlap": False},
    ),
    "gradients dropped in place of an empty batch": Row(
        Net, labelled, classify, empty_at_the_end, **EXACT, train=instead_of_an_empty_batch,
        options={"batch_dim": 0, "backward_passes_per_step": 2},
    ),
    "a last smaller batch of a ShardedSampler": Row(
        Net, labelled, classify, **EXACT, batches=loaded
    ),
    "likewise, with model.loss(x)": Row(Net, labelled, by_method, **EXACT, batches=loaded),
    "likewise, with autograd.grad": Row(
        Net, labelled, classify, **EXACT, batches=loaded, train=by_grad
    ),
    "likewise, in two parts": Row(
        Net, labelled, classify, **EXACT, batches=loaded, train=in_two_parts,
        options={"backward_passes_per_step": 2},
    ),
    "likewise, with several calls": Row(Net, labelled, of_two_views, **EXACT, batches=loaded),
    "batches from memory": Row(Net, labelled, classify, **EXACT, batches=from_memory),
    "a last smaller batch of torch's sampler": Row(
        Net, labelled, classify, says=False, batches=by_torchs_sampler
    ),
    "weigh='equal'": Row(Net, labelled, classify, says=False, options={"batch_dim": 0, "weigh": "equal"}),
    "weigh='equal', batches of a ShardedSampler": Row(
        Net, labelled, classify, says=False, options={"weigh": "equal"}, batches=loaded
    ),
}  # fmt: skip

#: Where servers step, too: habits, whatever their loss is.
ON_SERVERS = list(ROWS)

#: Losses that nothing looks at: the weight of a worker is that of its batch.
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "two heads, of which one ignores labels": of_two_heads,
    "losses added up one by one": one_by_one,
    "words, and a term per text": of_words_and_a_text,
    "pairs in the batch": lambda model, x, y: F.cross_entropy(model(x) @ model(x).roll(1, 0).T, torch.arange(len(x))),
    "a norm": lambda model, x, y: (model(x) - x[:, :CLASSES]).norm(),
    "a term that only some batches have": of_positives,
    "workers that draw tasks": of_a_drawn_task,
    "hard triplets, which some batches do not have": of_hard_triplets,
    "a loss in an autograd.Function": in_a_function,
}
for name, loss in LOSSES.items():
    ROWS[name] = Row(Net, labelled, loss)
    ROWS[f"{name}, with batch_dim"] = Row(Net, labelled, loss, **EXACT, options={"batch_dim": 0})
    ROWS[f"{name}, as many"] = Row(Net, labelled, loss, same, says=False)


def apart(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return differences, so small that sums of their squares train slowly."""
    return 0.1 * (model(x) - x[:, :CLASSES])


#: Sums over the samples of a batch, and other losses, in as many steps.
GROWING: dict[str, Callable[..., torch.Tensor]] = {
    "a cross entropy that is a sum": lambda model, x, y: 0.01 * F.cross_entropy(model(x), y, reduction="sum"),
    "squares, summed twice": lambda model, x, y: (apart(model, x) ** 2).sum(1).sum(),
    "a squared norm": lambda model, x, y: apart(model, x).norm() ** 2,
    "torch.dot": lambda model, x, y: torch.dot(apart(model, x).flatten(), apart(model, x).flatten()),
    "einsum": lambda model, x, y: torch.einsum("ij,ij->", apart(model, x), apart(model, x)),
    "nansum": lambda model, x, y: torch.nansum(apart(model, x).square()),
    "a product of matrices": lambda model, x, y: (apart(model, x).view(1, -1) @ apart(model, x).view(-1, 1)).squeeze(),
    "a sum of the means of parts": lambda model, x, y: sum(one.square().mean() for one in apart(model, x)),
    "half of the squares": lambda model, x, y: 0.5 * apart(model, x).pow(2).sum(),
    "a trace": lambda model, x, y: torch.trace(apart(model, x) @ apart(model, x).T),
    "Python's sum of losses": lambda model, x, y: 0.01 * len(y) * one_by_one(model, x, y),
}
MEANS: dict[str, Callable[..., torch.Tensor]] = {
    "a mean of squares": lambda model, x, y: apart(model, x).square().sum(1).mean(),
    "a norm of differences": lambda model, x, y: apart(model, x).norm(),
}
for name, loss in (GROWING | MEANS).items():
    ROWS[f"{name}, of many steps"] = Row(
        Net, labelled, loss, half, **EXACT, steps=32, grows=name in GROWING, options={"batch_dim": 0}
    )
ROWS["a sum of equal weights"] = Row(Net, labelled, GROWING["half of the squares"], half, steps=32, grows=True)


# ---- one process, and a job --------------------------------------------------------------------------------------


def batches_of(row: Row, rank: int) -> Iterator[Batch]:
    if row.batches is not None:
        yield from row.batches(rank)
        return
    for step in range(row.steps):
        yield row.batch(step, rank, row.count(step, rank))


def new_model(row: Row) -> nn.Module:
    torch.manual_seed(7)
    return row.model()


def weights_of(model: nn.Module) -> list[float]:
    return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()


def weight_of(row: Row, batch: Batch) -> int:
    return len(batch[-1]) if row.weighs == "samples" else min(1, len(batch[-1]))


def reference(row: Row) -> list[float]:
    """Return the weights of one process that has the batches of both workers."""
    model = new_model(row)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for both in zip(*(batches_of(row, rank) for rank in range(WORKERS)), strict=True):
        weights = [weight_of(row, batch) for batch in both]
        optimizer.zero_grad()
        losses = [weight * row.loss(model, *batch) for weight, batch in zip(weights, both, strict=True) if weight]
        (sum(losses) / sum(weights)).backward()
        optimizer.step()
    return weights_of(model)


Told = list[tuple[int, Any]]


def train(name: str, rank: int, kvstore: str, options: dict[str, Any]) -> tuple[list[float], Told]:
    """Train as a worker of a job; returns the weights, and what this worker has told of its steps."""
    row, told = ROWS[name], []
    model = new_model(row)
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = DistributedOptimizer(inner, kvstore, model=model, **row.options, **options)
    exchange = optimizer._merging._exchange
    exchange.tell_step = lambda step, weights, batch: told.append((step, msgspec.to_builtins(batch)))
    for batch in batches_of(row, rank):
        (row.train or usual)(row, model, optimizer, batch)
    weights = weights_of(model)
    optimizer.close()
    return weights, told


def run_rows(names: list[str], options: dict[str, Any]) -> None:
    rank = paceline.kvstore.create("dist_sync").rank
    for name in names:
        tell(train(name, rank, "dist_sync", options))


def lines_of(*workers: Told) -> list[str]:
    """Return the lines that follow from what workers have told of their steps."""
    steps, lines = ToldSteps(), []
    for told in zip(*workers, strict=True):
        for rank, (step, batch) in enumerate(told):
            steps.note(rank, [m.WorkerStep("s", step, batch=msgspec.convert(batch, m.StepBatch))])
        lines += steps.check(lambda: range(WORKERS))
    return lines


def check(name: str, found: list[tuple[list[float], Told]]) -> None:
    (first, told), (second, other_told) = found
    row = ROWS[name]
    assert first == second
    assert torch.allclose(torch.tensor(first), torch.tensor(reference(row)), atol=1e-5)
    how, *warnings = lines_of(told, other_told)
    assert ("weigh equally" in how) == (row.weighs == "equally")
    assert [one.split()[0] for one in warnings] == ["inputs"] * row.says + ["losses"] * row.grows, warnings


def outcomes(update: str) -> dict[str, Any]:
    """Run rows in one job; returns by row what the workers found."""
    names = ON_SERVERS if update == "server" else list(ROWS)
    with LocalJob(WORKERS, 2) as job:
        workers = job.start_all(run_rows, names, {"update": update})
        return {name: [worker.heard() for worker in workers] for name in names}


@pytest.fixture(scope="module")
def on_workers() -> dict[str, Any]:
    return outcomes("worker")


@pytest.fixture(scope="module")
def on_servers() -> dict[str, Any]:
    return outcomes("server")


@pytest.mark.parametrize("name", ROWS)
def test_weights_are_those_of_one_process_and_what_is_not_known_is_said(on_workers: dict[str, Any], name: str) -> None:
    check(name, on_workers[name])


@pytest.mark.parametrize("name", ON_SERVERS)
def test_weights_are_likewise_where_servers_step(on_servers: dict[str, Any], name: str) -> None:
    check(name, on_servers[name])


ALL_REDUCED = (
    "embedding bags", "packed sequences", "model.loss(x)", "an empty batch", "an empty batch that is left out",
    "plain unequal batches", "plain batches, as many", "plain unequal batches, with batch_dim", "rnn(h0, x)",
    "a last smaller batch of a ShardedSampler", "likewise, with autograd.grad", "workers that draw tasks",
    "half of the squares, of many steps", "a mean of squares, of many steps",
)  # fmt: skip


def reduce_rows(names: list[str]) -> list[Any]:
    rank = paceline.kvstore.create("allreduce").rank
    return [train(name, rank, "allreduce", {}) for name in names]


def test_a_store_without_servers_weighs_likewise() -> None:
    found = run_ranks(reduce_rows, WORKERS, list(ALL_REDUCED))
    for index, name in enumerate(ALL_REDUCED):
        check(name, [one[index] for one in found])


def said_in_a_job(kvstore: str, options: dict[str, Any], told_by_0: bool, **more: Any) -> list[str]:
    """Train on unequal batches; return what this worker logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    rank = paceline.kvstore.create(kvstore, **more).rank
    model = new_model(ROWS["plain unequal batches"])
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()), kvstore, model=model, **options)
    for step in range(STEPS):
        x, y = labelled(step, rank, unequal(step, rank))
        optimizer.samples = 4 if told_by_0 and rank == 0 else None
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()
    optimizer.close()
    assert ("paceline.torch_hooks.loss_graph" in sys.modules) == (options.get("weigh") == "loss")
    return lines


EQUALLY = "workers weigh equally, as with DistributedDataParallel: no sampler of paceline deals the batches"


@pytest.mark.parametrize(
    ("kvstore", "options", "told_by_0", "said"),
    [
        ("dist_sync", {}, False, [EQUALLY, "inputs are [3, 5] on worker 0 and [5, 5] on worker 1"]),
        ("dist_sync", {"weigh": "loss"}, False, ["workers weigh by the number that their losses are divided by"]),
        ("dist_sync", {"local_steps": 1}, False, [EQUALLY, "inputs are [3, 5] on worker 0"]),
        ("dist_sync", {}, True, ["worker 1 weighs 1, and worker 0 weighs by samples (4 on worker 0)"]),
        ("dist_sync", {"reduction": "sum"}, False, ["workers weigh equally: gradients are added up"]),
        ("dist_async", {}, False, ["workers weigh equally: each push is an update by itself"]),
    ],
)
def test_a_job_says_how_its_workers_weigh(
    kvstore: str, options: dict[str, Any], told_by_0: bool, said: list[str]
) -> None:
    with LocalJob(WORKERS, 1) as job:
        job.run(said_in_a_job, kvstore, options, told_by_0)
        lines = [line for line in job.scheduler.output.splitlines() if "weigh" in line]
    assert [text in line for text, line in zip(said, lines, strict=True)] == [True] * len(said), lines


def test_a_job_without_servers_says_how_its_workers_weigh() -> None:
    first, second = run_ranks(said_in_a_job, WORKERS, "allreduce", {}, False)
    assert [EQUALLY in first[0], "inputs are [3, 5] on worker 0" in first[1], len(first), second] == [True, True, 2, []]
