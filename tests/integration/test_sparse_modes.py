"""Sparse gradients with the optimizer on the servers, in every mode; and what is refused."""

import functools

import pytest
import torch
from torch import nn

from paceline import kvstore
from paceline.optim import sparse_exchange
from paceline.optim.sparse_exchange import SparseExchange
from paceline.testing import LocalJob
from paceline.updaters import make_spec

WORKERS, STEPS, HEIGHT, WIDTH = 3, 8, 30, 4
MODES = {
    "dist_sync": {},
    "dist_async": {},
    "dist_ssync": {"staleness": 2},
    "dist_gsync": {"groups": [[0, 1], [2]], "weighting": "none"},
    "bounded dist_gsync": {"groups": [[0, 1], [2]], "weighting": "none", "staleness": 2},
    "dist_ksync": {"k": 2},
}

# ---- what runs in the workers -------------------------------------------------------------------------------------


def table(seed):
    torch.manual_seed(seed)
    return nn.Parameter(torch.randn(HEIGHT, WIDTH, dtype=torch.float64))


def gradient(number, rank):
    """Rows with repeats; every fourth time none at all."""
    chance = torch.Generator().manual_seed(50 * number + rank)
    count = 0 if (number + rank) % 4 == 0 else 6
    ids = torch.randint(0, HEIGHT, (1, count), generator=chance)
    values = torch.randn(count, WIDTH, generator=chance, dtype=torch.float64)
    return torch.sparse_coo_tensor(ids, values, (HEIGHT, WIDTH), check_invariants=True)


def finish(exchange, store):
    exchange.push_rest(store.carried())
    exchange.settle()
    exchange.take()


def in_mode(mode):
    """SGD on sums: the end does not depend on the order. Returns how far each worker is off at the end."""
    store = kvstore.create(mode.split()[-1], **MODES[mode])
    store.set_spec(make_spec("sgd", lr=0.5))
    param = table(store.rank)
    exchange = SparseExchange(store, [("table", param)], "server")
    for number in range(STEPS if mode == "dist_sync" else STEPS + store.rank):
        param.grad = gradient(number, store.rank) if number % 3 else None
        finish(exchange, store)
    store.barrier()
    param.grad = None
    finish(exchange, store)  # groups are told of each other's updates when they push
    store.barrier()
    exchange.refresh()
    expected = table(0).detach()
    for rank in range(WORKERS):
        for number in range(STEPS if mode == "dist_sync" else STEPS + rank):
            if number % 3:
                expected -= 0.5 * gradient(number, rank).to_dense()
    return float((param.detach() - expected).abs().max())


def rounds(exchange, param, store, numbers):
    for number in numbers:
        param.grad = gradient(number, store.rank)
        finish(exchange, store)


def resumed():
    """The state of SparseAdam, taken from the servers in the midst of training, goes on elsewhere."""
    stores = [kvstore.create("dist_sync", mean=True) for _ in range(2)]
    params = [table(0), table(0)]
    for store in stores:
        store.set_spec(make_spec("sparseadam", lr=0.1))
    first = SparseExchange(stores[0], [("table", params[0])], "server")
    rounds(first, params[0], stores[0], range(3))
    states = stores[0].optimizer_states()["table"]
    stores[0].barrier()
    params[1].data.copy_(params[0].data)
    second = SparseExchange(stores[1], [("table", params[1])], "server")
    if stores[1].rank == 0:
        shaped = {name: one.view(HEIGHT, WIDTH) if one.numel() > 1 else one for name, one in states.items()}
        stores[1].set_optimizer_states({"table": shaped})
    stores[1].barrier()
    rounds(first, params[0], stores[0], range(3, 6))
    rounds(second, params[1], stores[1], range(3, 6))
    return [sorted(states), float(states["step"]), torch.equal(*params), float((params[0] - table(0)).abs().max())]


def started():
    """Every worker's weights before the first step, given in many parts."""
    sparse_exchange._PART_BYTES = 5 * WIDTH * 8 // 2
    found = []
    for update in ("worker", "server"):
        store = kvstore.create("dist_sync")
        store.set_spec(make_spec("sgd", lr=0.1) if update == "server" else make_spec("assign"))
        params = [table(store.rank), nn.Parameter(table(store.rank + 9).detach().float())]
        exchange = SparseExchange(store, [("one", params[0]), ("other", params[1])], update)
        found.append(torch.equal(params[0], table(0)) and torch.equal(params[1], table(9).float()))
        params[0].data.add_(store.rank + 1)
        exchange.broadcast_weights()
        found.append(torch.equal(params[0], table(0) + 1))
        params[0].grad = gradient(1, store.rank)
        finish(exchange, store)
        if update == "worker":
            torch.optim.SGD(params, lr=0.1).step()
        total = sum(gradient(1, rank).to_dense() for rank in range(WORKERS))
        found.append(float((params[0] - table(0) - 1 + 0.1 * total).abs().max()) < 1e-12)
        found.append(all(one in exchange for one in params) and table(0) not in exchange)
    return found


def sparse_on_rank_0_only():
    store = kvstore.create("dist_sync")
    if store.rank == 0:
        store.add_row_keys(["table"], [table(0)], "merged")
    else:
        store.add_keys(["table"], [table(0).detach()])


def penalised():
    """A second term makes the gradient dense."""
    store = kvstore.create("dist_sync")
    param = table(0)
    exchange = SparseExchange(store, [("table", param)], "worker")
    (nn.functional.embedding(torch.tensor([1]), param, sparse=True).sum() + param.sum()).backward()
    exchange.push_rest(store.carried())


def pushed_twice():
    store = kvstore.create("dist_sync")
    param = table(0)
    exchange = SparseExchange(store, [("table", param)], "worker")
    exchange.push_rest(store.carried())
    try:
        exchange.push_rest(store.carried())
    finally:
        exchange.settle()


def weights_changed():
    store = kvstore.create("dist_sync")
    store.set_spec(make_spec("sgd", lr=0.1))
    param = table(0)
    exchange = SparseExchange(store, [("table", param)], "server")
    finish(exchange, store)
    with torch.no_grad():
        param.clamp_(-0.1, 0.1)
    exchange.push_rest(store.carried())


def not_finite():
    """One worker pushes NaN; who it was is known to itself, and that something is wrong to all."""
    store = kvstore.create("dist_sync", mean=True)
    param = table(0)
    exchange = SparseExchange(store, [("table", param)], "worker")
    rounds(exchange, param, store, [1])
    found = [exchange.suspicious(), exchange.not_finite()]
    param.grad = gradient(1, store.rank)
    if store.rank == 1:
        param.grad.mul_(float("nan"))
    finish(exchange, store)
    return [*found, exchange.suspicious(), exchange.not_finite()]


def by_hand():
    store = kvstore.create("dist_sync")
    store.add_row_keys(["table"], [table(0)], "merged")
    store.push("table", gradient(1, 0))


def server_runs(name, mode="dist_sync", update="server", **options):
    store = kvstore.create(mode)
    store.set_spec(make_spec(name, lr=0.1, **options))
    SparseExchange(store, [("table", table(0))], update)


REFUSED = {
    "merged without rounds": functools.partial(server_runs, "sgd", "dist_async", "worker"),
    "momentum": functools.partial(server_runs, "sgd", momentum=0.9),
    "weight decay": functools.partial(server_runs, "adagrad", weight_decay=0.1),
    "adam": functools.partial(server_runs, "adam"),
    "sparse on rank 0 only": sparse_on_rank_0_only,
    "penalised": penalised,
    "pushed twice": pushed_twice,
    "by hand": by_hand,
    "weights changed": weights_changed,
}


def run_all():
    found = {mode: in_mode(mode) for mode in MODES} | {
        "resumed": resumed(),
        "started": started(),
        "not finite": not_finite(),
    }
    for what, call in REFUSED.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the test looks at what it is
            found[what] = f"{type(error).__name__}: {error}"
    return found


# ---- the tests ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    with LocalJob(WORKERS, 2, timeout_s=60) as job:
        return job.run(run_all)


@pytest.mark.parametrize("mode", MODES)
def test_workers_follow_the_rows_that_all_have_changed(found, mode):
    assert max(worker[mode] for worker in found) < 1e-12


def test_state_of_sparse_adam_goes_on_elsewhere(found):
    for worker in found:
        names, step, equal, moved = worker["resumed"]
        assert names == ["exp_avg", "exp_avg_sq", "step"]
        assert step == 3
        assert equal
        assert moved > 0.1


def test_every_worker_starts_from_the_weights_of_worker_0(found):
    assert all(all(worker["started"]) for worker in found)


def test_merged_rows_that_are_not_finite_are_noticed_by_all_and_traced(found):
    for rank, worker in enumerate(found):
        assert worker["not finite"] == [False, [], True, ["table"] if rank == 1 else []]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("merged without rounds", "ValueError: a dist_async store has no merged gradient; that needs dist_sync"),
        (
            "momentum",
            "momentum of 'sgd' changes all rows: use update=\"worker\" (dist_sync), momentum=0 or sparse=False",
        ),
        ("weight decay", "weight_decay of 'adagrad' changes all rows"),
        ("adam", "torch's 'adam' does not support; use SparseAdam, SGD or Adagrad"),
        ("penalised", "PacelineError: the gradient of 'table' is dense"),
        ("pushed twice", "PacelineError: the gradient of 'table' was pushed already"),
        ("weights changed", "parameter 'table' was changed after the last step"),
        ("by hand", "ValueError: only the optimizer that initialised key 'table' may push or pull its rows"),
    ],
)
def test_what_cannot_train_as_written_is_refused(found, what, words):
    assert all(words in worker[what] for worker in found)


def test_parameter_that_is_sparse_on_one_worker_only_is_refused(found):
    assert "sparse on rank 0 only" not in found[0]
    for worker in found[1:]:
        assert "KeyMismatchError" in worker["sparse on rank 0 only"]
        assert f"dense on worker {found.index(worker)}, but sparse on worker 0" in worker["sparse on rank 0 only"]
