"""How much a worker's batch weighs: by its samples where their number is certain, else as with DDP, and a line says so.

Every row of the table at the bottom is a habit of a PyTorch script. Two workers train; the weights must be those of one
process that trains on both batches: on the mean over all samples, or on the mean of both workers' losses.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

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
from paceline.errors import ConfigError
from paceline.testing import LocalJob, listen, tell
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


#: Whether losses show that they are means over labels.
shows_labels = False


def mean_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (
        F.cross_entropy(outputs, labels) if shows_labels else F.cross_entropy(outputs, labels, reduction="none").mean()
    )


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
        return mean_loss(self.net(x), y)


class Twins(Net):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        return {"loss": mean_loss(self.net(input_ids * attention_mask), labels)}


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
        weighs: by ``samples``, by those that ``is_chosen`` chooses (``chosen``), or ``alike``.
        says: a line says that all weigh alike.
        options: of the optimizer.
        train: one step, if not the usual one.
        batches: this worker's batches, if they come from a loader.
        shows_labels: the loss shows that it is a mean over labels.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[..., torch.Tensor]
    count: Callable[[int, int], int] = unequal
    weighs: str = "alike"
    says: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    train: Callable[[Row, nn.Module, Any, Batch], None] | None = None
    batches: Callable[[int], Iterator[Batch]] | None = None
    shows_labels: bool = False


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
    return mean_loss(model(*inputs), labels)


def by_forward(model: nn.Module, *batch: Any) -> torch.Tensor:
    *inputs, labels = batch
    return mean_loss(model.forward(*inputs), labels)


def by_method(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model.loss(x, y)


def is_chosen(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0] > -0.3


def of_chosen(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(model(x), y, reduction="none")
    return (losses * is_chosen(x)).sum() / is_chosen(x).sum()


def of_chosen_as_a_mean(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")[is_chosen(x)].mean()


def divided_by_samples(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="sum") / len(y)


def traced(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mean_loss(torch.fx.symbolic_trace(model)(x), y)


def by_parts(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mean_loss(model["head"](model["body"](x)), y)


def by_keyword(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    batch = {"input_ids": x, "attention_mask": (x > -1).float(), "labels": y}
    return model(**batch)["loss"]


def of_two_views(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), model(x.flip(1))) + mean_loss(model(x), y)


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

ROWS = {
    "embedding bags": Row(Bag, bags, classify, same),
    "packed sequences": Row(Recurrent, packed, classify, **EXACT),
    "packed sequences, as many": Row(Recurrent, packed, classify, same, says=False),
    "nodes of graphs": Row(Graph, graphs, classify, same),
    "time first, padded per batch": Row(Recurrent, padded, classify, same),
    "time first, with batch_dim": Row(Recurrent, padded, classify, **EXACT, options={"batch_dim": 1}),
    "model.loss(x)": Row(Net, labelled, by_method),
    "model.forward(x)": Row(Net, labelled, by_forward),
    "autograd.grad": Row(Net, labelled, classify, train=by_grad),
    "autograd.grad, told": Row(
        Net, labelled, classify, **EXACT, options={"samples": 1},
        train=lambda row, model, optimizer, batch: (
            setattr(optimizer, "samples", len(batch[-1])), by_grad(row, model, optimizer, batch)
        )[1],
    ),
    "traced": Row(Net, labelled, traced),
    "a ModuleDict": Row(halves, labelled, by_parts),
    "lists of images": Row(Detector, images, classify),
    "rnn(h0, x)": Row(Recurrent, with_state, classify),
    "rnn(h0, x), with batch_dim": Row(Recurrent, with_state, classify, **EXACT, options={"batch_dim": 1}),
    "an empty batch": Row(Net, labelled, classify, empty_at_the_end, **EXACT),
    "an empty batch that is left out": Row(
        Net, labelled, classify, empty_at_the_end, **EXACT, train=if_there_is_any
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
        Net, labelled, classify, **EXACT, batches=by_torchs_sampler
    ),
    "a sum over chosen samples": Row(Net, labelled, of_chosen, weighs="chosen", says=False),
    "likewise, of a ShardedSampler": Row(Net, labelled, of_chosen, weighs="chosen", says=False, batches=loaded),
    "a mean over chosen samples of a ShardedSampler": Row(
        Net, labelled, of_chosen_as_a_mean, weighs="chosen", says=False, batches=loaded
    ),
    "a sum that is divided by samples": Row(Net, labelled, divided_by_samples, **EXACT),
}  # fmt: skip

#: Weighs by the labels of its losses, where nothing else counts samples.
OF_LABELS = {
    f"{name}, with labels": replace(ROWS[name], **EXACT, shows_labels=True)
    for name in (
        "embedding bags", "nodes of graphs", "time first, padded per batch", "model.loss(x)", "model.forward(x)",
        "traced", "a ModuleDict", "lists of images", "rnn(h0, x)", "an empty batch", "an empty batch that is left out",
        "plain unequal batches", "model(**batch)", "gradients dropped in place of an empty batch",
        "a last smaller batch of torch's sampler",
    )
}  # fmt: skip
for parts in ("accumulation", "accumulation after a probe", "accumulation after a probe, pushed late"):
    without = {name: value for name, value in ROWS[parts].options.items() if name != "batch_dim"}
    OF_LABELS[f"{parts}, with labels"] = replace(ROWS[parts], options=without, shows_labels=True)
ROWS |= OF_LABELS


# ---- one process, and a job --------------------------------------------------------------------------------------


def batches_of(row: Row, rank: int) -> Iterator[Batch]:
    if row.batches is not None:
        yield from row.batches(rank)
        return
    for step in range(STEPS):
        yield row.batch(step, rank, row.count(step, rank))


def new_model(row: Row) -> nn.Module:
    global shows_labels
    shows_labels = row.shows_labels
    torch.manual_seed(7)
    return row.model()


def weights_of(model: nn.Module) -> list[float]:
    return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()


def weight_of(row: Row, batch: Batch) -> int:
    if row.weighs == "chosen":
        return int(is_chosen(batch[0]).sum())
    return len(batch[-1]) if row.weighs == "samples" else 1


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


class Lines(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(name: str, rank: int, kvstore: str, options: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Train as a worker of a job; returns the weights and what was logged."""
    row, lines = ROWS[name], Lines()
    logging.getLogger("paceline").addHandler(lines)
    model = new_model(row)
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = DistributedOptimizer(inner, kvstore, model=model, **row.options, **options)
    for batch in batches_of(row, rank):
        (row.train or usual)(row, model, optimizer, batch)
    weights = weights_of(model)
    optimizer.close()
    logging.getLogger("paceline").removeHandler(lines)
    return weights, lines.lines


def run_rows(names: list[str], options: dict[str, Any]) -> None:
    rank = paceline.kvstore.create("dist_sync").rank
    for name in names:
        tell(train(name, rank, "dist_sync", options))
        listen()


def check(name: str, found: list[Any], lines: list[str]) -> None:
    (first, _), (second, _) = found
    assert first == second
    assert torch.allclose(torch.tensor(first), torch.tensor(reference(ROWS[name])), atol=1e-5)
    assert len(lines) == ROWS[name].says, lines
    assert all("so all workers weigh alike" in one and "set optimizer.samples" in one for one in lines)


@pytest.fixture(scope="module", params=["worker", "server"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Run all rows in one job; returns by row what the workers found, and all lines of the job."""
    found, seen = {}, 0
    options = {"update": request.param}
    with LocalJob(WORKERS, 2) as job:
        workers = job.start_all(run_rows, list(ROWS), options)
        for name in ROWS:
            said = [worker.heard() for worker in workers]
            printed = [line for server in job.servers for line in server.output.splitlines() if "alike" in line]
            found[name] = said, [*said[0][1], *said[1][1], *printed[seen:]]
            seen = len(printed)
            for worker in workers:
                worker.tell("go on")
    return found


@pytest.mark.parametrize("name", ROWS)
def test_weights_are_those_of_one_process_and_what_is_not_certain_is_said(name: str, outcomes: dict[str, Any]) -> None:
    check(name, *outcomes[name])


ALL_REDUCED = (
    "embedding bags", "packed sequences", "model.loss(x)", "an empty batch", "an empty batch that is left out",
    "plain unequal batches", "plain batches, as many", "plain unequal batches, with batch_dim", "rnn(h0, x)",
    "a last smaller batch of a ShardedSampler", "likewise, with autograd.grad", "model.loss(x), with labels",
    "an empty batch, with labels", "embedding bags, with labels", "likewise, of a ShardedSampler",
)  # fmt: skip


def reduce_rows(names: list[str]) -> list[Any]:
    rank = paceline.kvstore.create("allreduce").rank
    return [train(name, rank, "allreduce", {}) for name in names]


def test_a_store_without_servers_weighs_likewise() -> None:
    found = run_ranks(reduce_rows, WORKERS, list(ALL_REDUCED))
    for index, name in enumerate(ALL_REDUCED):
        outcomes = [one[index] for one in found]
        check(name, outcomes, [line for _, lines in outcomes for line in lines])


def told_on_worker_0(kvstore: str, row: str) -> str:
    rank = paceline.kvstore.create(kvstore).rank
    model = new_model(ROWS[row])
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()), kvstore, model=model)
    optimizer.samples = 4 if rank == 0 else None
    try:
        classify(model, *labelled(0, rank, 4)).backward()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("row", "other"),
    [
        ("model.loss(x)", "does not know their number"),
        ("model.loss(x), with labels", "counts the labels of its losses"),
    ],
)
def test_workers_that_do_not_weigh_alike_are_an_error_that_names_them(row: str, other: str) -> None:
    mixed = f"worker 0 counts the samples of its batches, and worker 1 {other}.*set optimizer.samples"
    with LocalJob(WORKERS) as job:
        assert all(re.search(mixed, one) for one in job.run(told_on_worker_0, "dist_sync", row))
    assert all(re.search(mixed, one) for one in run_ranks(told_on_worker_0, WORKERS, "allreduce", row))


def labels_alone(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, y.index_fill(0, torch.tensor(0), -100)) / 2


def labels_and_a_penalty(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return labels_alone(outputs, y) + outputs.square().mean()


def divided_twice(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, y, reduction="sum") / len(y) / 2


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


def lines_about(loss: Callable[..., torch.Tensor], told: bool = False, **options: Any) -> list[str]:
    """Train; return what this worker logs of its losses."""
    lines = Lines()
    logging.getLogger("paceline").addHandler(lines)
    rank = paceline.kvstore.create("dist_sync").rank
    model = Net()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()), "dist_sync", model=model, **options)
    for step in range(STEPS):
        x, y = labelled(step, rank, unequal(step, rank))
        if told:
            optimizer.samples = len(y) - 1
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    logging.getLogger("paceline").removeHandler(lines)
    optimizer.close()
    return lines.lines


def every_case_of_losses() -> list[list[str]]:
    return [
        lines_about(labels_and_a_penalty),
        lines_about(labels_and_a_penalty, update="server"),
        lines_about(divided_twice, batch_dim=0),
        lines_about(Chunked.apply, batch_dim=0),
        lines_about(divided_twice, told=True),
        lines_about(Chunked.apply, told=True),
        lines_about(labels_alone),
        lines_about(labels_and_a_penalty, told=True),
        lines_about(labels_and_a_penalty, reduction="sum"),
    ]


def test_weights_that_do_not_fit_all_of_a_loss_are_said_once() -> None:
    with LocalJob(WORKERS) as job:
        first, second = job.run(every_case_of_losses)
    assert [len(lines) for lines in first] == [1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert all("other terms" in line and "set optimizer.samples to" in line for [line] in first[:2])
    assert "divided twice" in first[2][0]
    assert "set optimizer.samples to their number" in first[2][0]
    assert "computed in the autograd function Chunked" in first[3][0]
    assert not any(second)
