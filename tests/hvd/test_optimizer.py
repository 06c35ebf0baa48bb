"""DistributedOptimizer: what ranks train together is what one process trains on the joined batch."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

import paceline.hvd as hvd
from tests.hvd.ranks import LONG, run, run_in_turn

STEPS, ROWS = (50 if LONG else 15), 4
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.001}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.005}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.005}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.001}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "Muon": (torch.optim.Muon, {"lr": 0.01}),
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 0.01}),
}
#: Its search calls the closure as often as a rank's own loss asks for; Horovod has no support for it either.
NOT_SUPPORTED = {"LBFGS"}
#: Every way of reducing, tried with two optimizers.
WAYS: list[dict[str, Any]] = [
    {"groups": 2},
    {"groups": "lists"},
    {"gradient_predivide_factor": 2.0},
    {"sparse_as_dense": True},
    {"deterministic": True},
]
#: The same for sparse gradients.
SPARSE = [
    ("SparseAdam", {}),
    ("SparseAdam", {"sparse_as_dense": True}),
    ("SGD", {}),
    ("SGD", {"sparse_as_dense": True}),
    ("Adagrad", {}),
]


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(rows, 5, generator=generator, dtype=torch.float64),
        torch.randint(3, (rows,), generator=generator),
    )


class Sparse(nn.Module):
    """Rows of a table by the signs of the data, so that ranks use different rows, and some the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(32, 3, sparse=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(((x > 0).long() * 2 ** torch.arange(5)).sum(1))
        return out


def train(model: nn.Module, name: str, mine: slice, passes: int, wrap: dict[str, Any] | None) -> torch.Tensor:
    """Train on a part of each batch; returns all weights."""
    cls, options = OPTIMIZERS[name]
    params = [param for param in model.parameters() if name != "Muon" or param.dim() == 2]
    optimizer: Any = cls(params, **options)
    if wrap is not None:
        extra = dict(wrap)
        if extra.get("groups") == "lists":
            extra["groups"] = [[model[0].weight, model[2].bias], [model[0].bias]]
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), backward_passes_per_step=passes, **extra
        )
        assert isinstance(optimizer, cls)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            x, y = data(step * passes + number, ROWS * hvd.size())
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def compare() -> dict[str, float]:
    """Return how much each way differs from one process with the joined batch."""
    hvd.init()
    mine = slice(ROWS * hvd.rank(), ROWS * (hvd.rank() + 1))
    cases = [(network, name, {}) for name in OPTIMIZERS if name != "SparseAdam"]
    cases += [(network, name, wrap) for name in ("SGD", "Adam") for wrap in WAYS]
    cases += [(Sparse, name, wrap) for name, wrap in SPARSE]
    alone: dict[Any, torch.Tensor] = {}
    found = {}
    for (make, name, wrap), passes in itertools.product(cases, (1, 3)):
        key = make, name, passes
        if key not in alone:
            alone[key] = train(make(), name, slice(None), passes, None)
        ours = train(make(), name, mine, passes, wrap)
        found[f"{make.__name__} {name} {wrap} {passes} passes"] = (ours - alone[key]).abs().max().item()
    return found


@pytest.mark.parametrize("size", [2, 4] if LONG else [2])
def test_every_optimizer_and_way_of_reducing_equals_one_process(size: int) -> None:
    for found in run(compare, size):
        assert {case: error for case, error in found.items() if not error < 1e-5} == {}


def test_no_optimizer_of_torch_is_left_out() -> None:
    classes = {name for name, one in vars(torch.optim).items() if isinstance(one, type)}
    assert classes - {"Optimizer"} == set(OPTIMIZERS) | NOT_SUPPORTED


Found: TypeAlias = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    """Results of both ranks, by function and arguments."""
    return run_in_turn(
        2, uneven_accumulation, sparse_adam_as_dense, different_parts, (sparse_gradients, False),
        (sparse_gradients, True), misuse, state_and_copies, scaled, compiled, adasum_steps, adasum_copies,
        private_names, *((compressed, kind) for kind in COMPRESSIONS),
    )  # fmt: skip


def uneven_accumulation() -> bool:
    hvd.init()
    model, other = network(), network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), backward_passes_per_step=3
    )
    plain = torch.optim.SGD(other.parameters(), 0.1)
    for step, passes in enumerate((3, 2, 3, 1)):
        optimizer.zero_grad()
        plain.zero_grad()
        for number in range(passes):
            x, y = data(10 * step + number, 4)
            mine = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            nn.functional.cross_entropy(other(x), y).backward()
        optimizer.step()
        plain.step()
    return all(torch.allclose(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_last_accumulation_may_be_uneven(found: Found) -> None:
    assert found["uneven_accumulation"] == [True, True]


def sparse_adam_as_dense() -> list[Any]:
    hvd.init()
    torch.manual_seed(1)
    used, other = nn.Embedding(6, 2, sparse=True), nn.Embedding(6, 2, sparse=True)
    params = [("used", used.weight), ("other", other.weight)]
    inner = torch.optim.SparseAdam([used.weight, other.weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, params, sparse_as_dense=True)
    before = other.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        (used if hvd.rank() else other)(torch.tensor([3])).sum().backward()
        optimizer.step()
    moved = (before - other.weight.detach()).sum(1).abs() > 0.1
    return [moved.tolist(), [round(one, 5) for one in used.weight.sum(1).tolist()]]


def test_sparse_adam_with_sparse_as_dense_and_tables_that_a_rank_does_not_use(found: Found) -> None:
    first, second = found["sparse_adam_as_dense"]
    assert first == second
    assert first[0] == [False, False, False, True, False, False]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right, self.both = (nn.Linear(2, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(x) + (self.right(x) if hvd.rank() else self.left(x))


def different_parts() -> list[float]:
    hvd.init()
    model = Two()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return [round(param.sum().item(), 5) for param in model.parameters()]


def test_ranks_may_use_different_parts_of_the_model(found: Found) -> None:
    first, second = found["different_parts"]
    assert first == second


def sparse_gradients(as_dense: bool) -> list[Any]:
    hvd.init()
    torch.manual_seed(1)
    table = nn.Embedding(6, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), 1.0), table.named_parameters(), sparse_as_dense=as_dense
    )
    before = table.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank(), 5])).sum().backward()
        optimizer.step()
    return (before - table.weight.detach()).sum(1).tolist()


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense: bool, found: Found) -> None:
    for moved in found[f"sparse_gradients {as_dense}"]:
        assert moved == pytest.approx([2.0, 2.0, 0.0, 0.0, 0.0, 4.0])


def misuse() -> list[str]:
    hvd.init()
    model = network()
    params = list(model.named_parameters())

    def make(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)

    def error_of(operation: Any) -> str:
        try:
            operation()
        except (ValueError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    weight = model[0].weight
    found = [
        error_of(lambda: make(named_parameters=[weight])),
        error_of(lambda: make(named_parameters=[*params, params[0]])),
        error_of(lambda: make(named_parameters=params[:1])),
        error_of(lambda: make(groups=[[weight], [weight]])),
        error_of(lambda: make(groups=[["x"]])),
        error_of(lambda: make(groups=-1)),
        error_of(lambda: make(backward_passes_per_step=0)),
        error_of(lambda: make(gradient_predivide_factor=2.0, op=hvd.Sum)),
    ]
    optimizer = make(named_parameters=params)
    x, y = data(0, 4)

    def backward() -> None:
        nn.functional.cross_entropy(model(x), y).backward()

    backward()
    found.append(error_of(backward))
    found.append(error_of(optimizer.zero_grad))
    optimizer.step()
    optimizer.zero_grad()
    backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    found.append(f"{caught[0].category.__name__}: {caught[0].message}")
    backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught, optimizer.skip_synchronize():
        warnings.simplefilter("always")
        optimizer.step()
    found.append(str(len(caught)))
    return found


def test_misuse(found: Found) -> None:
    texts, _ = found["misuse"]
    kinds = [one.split(":")[0] for one in texts]
    assert kinds == ["ValueError"] * 8 + ["AssertionError"] * 2 + ["UserWarning", "0"], texts
    assert "more than backward_passes_per_step" in texts[8]
    assert "zero_grad() was called after loss.backward()" in texts[9]


def state_and_copies() -> list[bool]:
    hvd.init()
    model = network()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    nn.functional.cross_entropy(model(data(0, 4)[0]), data(0, 4)[1]).backward()
    inner.step()
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    found = [len(optimizer.state) == 4, optimizer.param_groups is inner.param_groups]
    optimizer.zero_grad(set_to_none=True)
    for one in (pickle.loads(pickle.dumps(optimizer)), copy.copy(optimizer)):
        found.append(type(one).__name__ == "Adam" and isinstance(one, torch.optim.Adam) and len(one.state) == 4)
    pair = copy.deepcopy((model, optimizer))
    nn.functional.cross_entropy(pair[0](data(hvd.rank(), 4)[0]), data(1, 4)[1]).backward()
    pair[1].step()
    sums = hvd.allgather(torch.cat([param.detach().flatten() for param in pair[0].parameters()]).view(1, -1))
    found.append(torch.equal(sums[0], sums[1]))
    return found


def test_state_is_kept_and_copies_work(found: Found) -> None:
    assert found["state_and_copies"] == [[True] * 5] * 2


def scaled() -> list[Any]:
    hvd.init()
    model = network().float()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(4):
        optimizer.zero_grad()
        x, y = data(step * 2 + hvd.rank(), 4)
        loss = nn.functional.cross_entropy(model(x.float()), y)
        if step == 2 and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), [round(param.sum().item(), 5) for param in model.parameters()]]


def test_grad_scaler_needs_nothing_special(found: Found) -> None:
    first, second = found["scaled"]
    assert first == second
    assert first[0] == 1.0
    assert all(abs(value) < 100 for value in first[1])


def compiled() -> list[list[float]]:
    """Train with a function that does all of a step, compiled and not."""
    hvd.init()
    weights = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = network()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())

        def step(x: torch.Tensor, y: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        run_step = torch.compile(step, backend="aot_eager") if is_compiled else step
        for number in range(4):
            run_step(*data(number * 2 + hvd.rank(), 4))
        weights.append([round(param.sum().item(), 6) for param in model.parameters()])
    return weights


def test_a_whole_step_may_be_compiled(found: Found) -> None:
    first, second = found["compiled"]
    assert first[0] == first[1] == second[0] == second[1]


COMPRESSIONS = ["none", "fp16", "bf16", "codec:int8", "codec:fp16"]


def compressed(kind: str) -> float:
    """Return how much the weights differ from those of one process with the joined batch."""
    hvd.init()
    compression: Any = (
        hvd.CodecCompression({"type": kind[6:]}) if kind[:6] == "codec:" else getattr(hvd.Compression, kind)
    )
    model, other = network().float(), network().float()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=compression
    )
    plain = torch.optim.SGD(other.parameters(), 0.1)
    for step in range(30):
        x, y = data(step, 8)
        mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
        optimizer.zero_grad()
        plain.zero_grad()
        nn.functional.cross_entropy(model(x[mine].float()), y[mine]).backward()
        nn.functional.cross_entropy(other(x.float()), y).backward()
        optimizer.step()
        plain.step()
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_compression(kind: str, found: Found) -> None:
    first, second = found[f"compressed {kind}"]
    assert first == second
    assert first < (1e-5 if kind == "none" else 2e-2)


def adasum_steps() -> list[float]:
    hvd.init()
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), op=hvd.Adasum
    )
    for step in range(5):
        x, y = data(2 * step + hvd.rank(), 4)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    try:
        optimizer.skip_synchronize()
    except AssertionError:
        return [param.sum().item() for param in model.parameters()]
    return []


def test_adasum(found: Found) -> None:
    first, second = found["adasum_steps"]
    assert first == pytest.approx(second)
    assert first


def adasum_copies() -> list[bool]:
    part = hvd.ProcessSet([0])
    hvd.init(process_sets=[part])
    model = network()
    inner = torch.optim.Adam(model.parameters(), 0.1)
    with pytest.raises(NotImplementedError, match="non-global process sets"):
        hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Adasum, process_set=part)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Adasum)
    nn.functional.cross_entropy(model(data(0, 4)[0]), data(0, 4)[1]).backward()
    optimizer.step()
    found = []
    pairs = [pickle.loads(pickle.dumps((model, optimizer))), copy.deepcopy((model, optimizer))]
    for other, one in [*pairs, (model, copy.copy(optimizer))]:
        found.append(isinstance(one, torch.optim.Adam) and len(one.state) == 4)
        one.zero_grad()
        nn.functional.cross_entropy(other(data(hvd.rank(), 4)[0]), data(1, 4)[1]).backward()
        one.step()
        sums = hvd.allgather(torch.cat([param.detach().flatten() for param in other.parameters()]).view(1, -1))
        found.append(torch.equal(sums[0], sums[1]) and one.backward_passes_per_step == 1)
    return found


def test_copies_of_an_adasum_optimizer_step_with_all_ranks(found: Found) -> None:
    assert found["adasum_copies"] == [[True] * 6] * 2


def private_names() -> list[bool]:
    hvd.init()
    model = network()
    model[2].bias.requires_grad_(False)
    trained = {param for param in model.parameters() if param.requires_grad}
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), backward_passes_per_step=2)
    names = {param: name for name, param in model.named_parameters()}
    found = [optimizer._parameter_names == names, optimizer._requires_update == trained, optimizer._handles == {}]
    for left in (1, 0):
        nn.functional.cross_entropy(model(data(0, 4)[0]), data(0, 4)[1]).backward()
        found.append(set(optimizer._handles) == trained)
        found.append({optimizer._allreduce_delay[param] for param in trained} == {left})
    optimizer.step()
    found += [optimizer._handles == {}, optimizer._compression is hvd.Compression.none]
    optimizer.set_backward_passes_per_step(3)
    found.append(pickle.loads(pickle.dumps(optimizer)).backward_passes_per_step == 3)
    optimizer.zero_grad()
    optimizer._requires_update = set()
    optimizer.step()  # sends nothing, so no gradients appear
    found.append(all(param.grad is None for param in trained))
    return found


def test_private_names_of_horovod_mean_the_same(found: Found) -> None:
    assert found["private_names"] == [[True] * 11] * 2
