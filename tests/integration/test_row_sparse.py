"""Row-sparse keys over real workers and servers, against the store inside one process."""

import tempfile
from pathlib import Path

import pytest
import torch

from paceline import kvstore
from paceline.testing import LocalJob

WORKERS, STEPS = 2, 6
HEIGHT, WIDTH = 50, (4, 3)
SCENARIOS = ("lock step", "one by one", "resumed", "errors")

# ---- what runs in the workers -------------------------------------------------------------------------------------


def rows(seed, dense=False):
    """A gradient of about ten rows, with repeats as an embedding makes them."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, HEIGHT, (1, 10), generator=chance)
    values = torch.randn(10, *WIDTH, generator=chance)
    grad = torch.sparse_coo_tensor(ids, values, (HEIGHT, *WIDTH), check_invariants=True)
    return grad.to_dense() if dense else grad


def no_rows():
    return torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, *WIDTH), (HEIGHT, *WIDTH))


def start(name):
    chance = torch.Generator().manual_seed(len(name))
    return torch.randn(HEIGHT, *WIDTH, generator=chance)


def make(kind, name="adam", **options):
    """A store with two row-sparse keys and a dense one."""
    store = kvstore.create(kind)
    store.set_optimizer(name, **(options or {"lr": 0.1}))
    store.init(["embed", "other", "dense"], [start("embed").to_sparse(1), start("other").to_sparse(1), torch.zeros(5)])
    return store


def table(store):
    found = {"embed": torch.zeros(HEIGHT, *WIDTH), "other": torch.zeros(HEIGHT, *WIDTH), "dense": torch.zeros(5)}
    store.pull(list(found), list(found.values()))
    return found


def difference(store, reference):
    ours, theirs = table(store), table(reference)
    return max(float((ours[key] - theirs[key]).abs().max()) for key in ours)


def step(store, reference, number):
    """One round of all keys: two devices per worker, one worker without rows of the second key."""
    grads = [[rows(100 * number + 10 * rank + device) for device in range(2)] for rank in range(WORKERS)]
    other = [rows(number), no_rows()]
    mine = [grads[store.rank], [other[store.rank]], [torch.ones(5)]]
    store.push(["embed", "other", "dense"], mine)
    everything = [[*grads[0], *grads[1]], other, [torch.ones(5)] * WORKERS]
    reference.push(["embed", "other", "dense"], everything)


def lock_step():
    store, reference = make("dist_sync"), make("local")
    seen = 0.0
    for number in range(STEPS):
        step(store, reference, number)
        ids = rows(number).coalesce().indices()[0]
        outs = [torch.zeros(HEIGHT, *WIDTH), torch.zeros(HEIGHT, *WIDTH).to_sparse(1)]
        wanted = [torch.zeros(HEIGHT, *WIDTH), torch.zeros(HEIGHT, *WIDTH).to_sparse(1)]
        store.row_sparse_pull("embed", outs, row_ids=ids)
        reference.row_sparse_pull("embed", wanted, row_ids=ids)
        pairs = zip(outs, wanted, strict=True)
        seen = max(seen, *(float((one.to_dense() - other.to_dense()).abs().max()) for one, other in pairs))
    return [seen, difference(store, reference)]


def one_by_one():
    """SGD without state: the end does not depend on the order of pushes."""
    store, reference = make("dist_async", "sgd", lr=0.5), make("local", "sgd", lr=0.5)
    for number in range(STEPS):
        store.push("embed", rows(10 * number + store.rank))
        for rank in range(WORKERS):
            reference.push("embed", rows(10 * number + rank))
    store.row_sparse_pull("embed", torch.zeros(HEIGHT, *WIDTH), row_ids=torch.tensor([0]))
    store.barrier()
    return [difference(store, reference)]


def resumed():
    """The optimizer's state of rows survives saving and loading; dense pushes of such a key go on with it."""
    store, reference = make("dist_sync", "sgd", lr=0.1, momentum=0.9), make("local", "sgd", lr=0.1, momentum=0.9)
    for number in range(2):
        step(store, reference, number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "states"
        store.save_optimizer_states(str(path))
        store.barrier()
        values = table(store)
        store = kvstore.create("dist_sync")
        store.set_optimizer("sgd", lr=0.1, momentum=0.9)
        sparse = [value if key == "dense" else value.to_sparse(1) for key, value in values.items()]
        store.init(list(values), sparse)
        store.load_optimizer_states(str(path))
    step(store, reference, 2)
    store.push("embed", rows(7 + store.rank, dense=True))
    reference.push("embed", [rows(7 + rank, dense=True) for rank in range(WORKERS)])
    return [difference(store, reference)]


def errors():
    store = make("dist_sync")
    calls = {
        "another shape": lambda: store.push("embed", torch.zeros(3, *WIDTH).to_sparse(1)),
        "no row_ids": lambda: store.row_sparse_pull("embed", torch.zeros(HEIGHT, *WIDTH)),
        "beyond": lambda: store.row_sparse_pull("embed", torch.zeros(HEIGHT, *WIDTH), row_ids=torch.tensor([50])),
        "rows of a vector": lambda: store.row_sparse_pull("dense", torch.zeros(5), row_ids=torch.tensor([1])),
    }
    found = {}
    for what, call in calls.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the test looks at what it is
            found[what] = [type(error).__name__, str(error)]
    reference = make("local")
    step(store, reference, 0)
    return found | {"after": difference(store, reference)}


def run_all():
    return {name: globals()[name.replace(" ", "_")]() for name in SCENARIOS}


# ---- the tests ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    with LocalJob(WORKERS, 2, timeout_s=60, bigarray_bound=200) as job:
        return job.run(run_all)


@pytest.mark.parametrize("scenario", ["lock step", "one by one", "resumed"])
def test_workers_update_rows_as_one_process_does(found, scenario):
    assert all(max(worker[scenario]) < 1e-5 for worker in found)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("another shape", "ValueError", "'embed' has shape (50, 4, 3)"),
        ("no row_ids", "ValueError", "needs row_ids"),
        ("beyond", "ValueError", "it has rows 0 to 49"),
        ("rows of a vector", "ValueError", "no bucket of its own for rows"),
    ],
)
def test_wrong_calls_are_refused_with_the_remedy_and_change_nothing(found, what, kind, words):
    for worker in found:
        assert worker["errors"][what][0] == kind
        assert words in worker["errors"][what][1]
        assert worker["errors"]["after"] < 1e-5
