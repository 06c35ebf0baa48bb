"""What a distributed store does with rows, keys and options is what the store inside one process does with them."""

import logging
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import kvstore
from paceline.errors import KeyMismatchError
from paceline.kvstore.base import KVStore
from paceline.testing import LocalJob
from paceline.updaters import KeyOptions

WORKERS, HEIGHT, WIDTH = 2, 20, 3
SCENARIOS = (
    "rows for a dense key",
    "rows beside dense values",
    "rows pushed and pulled in place",
    "rows of half precision",
    "sparse targets",
    "keys of numpy",
    "options",
    "rates by key",
    "states",
)

# ---- what runs in the workers, and in one process -----------------------------------------------------------------


def rows(seed, dtype=torch.float32):
    """A gradient of a few rows, with repeats as an embedding makes them."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, HEIGHT, (1, 6), generator=chance)
    values = torch.randint(-3, 4, (6, WIDTH), generator=chance).to(dtype)
    return torch.sparse_coo_tensor(ids, values, (HEIGHT, WIDTH), check_invariants=True)


def start(dtype=torch.float32):
    return torch.arange(HEIGHT * WIDTH).view(HEIGHT, WIDTH).to(dtype)


def everybodys(store, make):
    """What this store is given of the values of all workers: in one process everything, else this worker's part."""
    return [make(store.rank)] if store.num_workers > 1 else [make(rank) for rank in range(WORKERS)]


def pulled(store, key, like):
    out = torch.empty_like(like)
    store.pull(key, out)
    return out


def rows_for_a_dense_key(store):
    store.set_optimizer("sgd", lr=0.5, momentum=0.5)
    store.init("w", start())
    for step in range(3):
        store.push("w", everybodys(store, lambda rank, step=step: rows(10 * step + rank)))
    return [pulled(store, "w", start())]


def rows_beside_dense_values(store):
    store.set_optimizer("sgd", lr=0.5, momentum=0.5)
    store.init(["w", "e"], [start(), start().to_sparse(1)])
    for step in range(2):
        grads = [everybodys(store, lambda rank, step=step: rows(10 * step + rank)) for _ in range(2)]
        store.push(["w", "e"], [[*some, torch.full((HEIGHT, WIDTH), 0.5 * len(some))] for some in grads])
    return [pulled(store, key, start()) for key in "we"]


def rows_pushed_and_pulled_in_place(store):
    store.init(["w", "e"], [start(), start().to_sparse(1)])
    grads = [everybodys(store, lambda rank, key=key: rows(key + rank)) for key in (0, 10)]
    store.pushpull(["w", "e"], grads)
    return [one.to_dense() for some in grads for one in some[:1]]


def rows_of_half_precision(store):
    found = []
    for dtype in (torch.float16, torch.bfloat16):
        keys = [f"{dtype} {way}" for way in ("rows", "dense")]
        store.init(keys, [start(dtype).to_sparse(1), start(dtype)])
        for step in range(2):
            grads = everybodys(store, lambda rank, step=step, dtype=dtype: rows(10 * step + rank, dtype))
            store.push(keys, [[*grads, *grads], grads])
        found += [pulled(store, key, start()) for key in keys]
    return found


def sparse_targets(store):
    value = start()
    value[::2] = 0
    store.init(["w", "e"], [value, value.to_sparse(1)])
    found = []
    for key in "we":
        outs = [torch.sparse_coo_tensor(size=(HEIGHT, WIDTH)), torch.zeros(HEIGHT, WIDTH)]
        store.pull(key, outs)
        found += [outs[0].to_dense(), outs[1]]
        store.pull(key, outs[0], ignore_sparse=False)
        found += [outs[0].to_dense(), outs[0].coalesce().indices()[0]]
    return found


def keys_of_numpy(store):
    store.set_optimizer("sgd", lr=1.0, keys={np.int64(5): KeyOptions(lr_mult=0.5)})
    store.init(np.arange(3, 6), [torch.zeros(2)] * 3)
    store.set_options(keys={np.int32(4): KeyOptions(lr_mult=0.25)})
    store.push([3, np.int64(4), np.uint8(5)], [everybodys(store, lambda rank: torch.ones(2))] * 3)
    store.row_sparse_pull(np.int64(3), torch.zeros(2), row_ids=torch.tensor([0])) if store.num_workers == 1 else None
    return [pulled(store, key, torch.zeros(2)) for key in (np.int16(3), 4, np.int64(5))]


def options(store):
    store.set_optimizer("sgd", momentum=0.5)
    store.init("w", torch.zeros(2))
    found = [torch.tensor([store.learning_rate, *(store.options()[0][name] for name in ("momentum", "weight_decay"))])]
    for rate in (1.0, 0.5):
        store.set_learning_rate(rate)
        store.push("w", everybodys(store, lambda rank: torch.ones(2)))
        found += [torch.tensor(store.learning_rate), pulled(store, "w", torch.zeros(2))]
    store.set_options([{"lr": 2.0}])
    store.push("w", everybodys(store, lambda rank: torch.ones(2)))
    store.set_optimizer("sgd", lr=0.25)
    store.push("w", everybodys(store, lambda rank: torch.ones(2)))
    return [*found, torch.tensor(store.learning_rate), pulled(store, "w", torch.zeros(2))]


def rates_by_key(store):
    """Options that are not given again stay in force."""
    store.set_optimizer("sgd", lr=1.0)
    store.init(["a", "b"], [torch.zeros(1), torch.zeros(1)])
    for change in ({"keys": {"b": KeyOptions(lr_mult=0.5)}}, {"groups": [{"lr": 2.0}]}, {"keys": {}}, {}):
        store.set_options(**change)
        store.push(["a", "b"], [everybodys(store, lambda rank: torch.ones(1)) for _ in range(2)])
    return [pulled(store, key, torch.zeros(1)) for key in "ab"]


def states(store):
    """State is read, set and saved under one name each; what is read goes on as if never interrupted."""
    store.set_optimizer("adam", lr=0.5)
    store.init("w", torch.zeros(4))
    gradient = lambda step: everybodys(store, lambda rank: torch.arange(4.0) + step + rank)  # noqa: E731
    store.push("w", gradient(0))
    pulled(store, "w", torch.zeros(4))
    before = store.optimizer_states()
    store.push("w", gradient(1))
    pulled(store, "w", torch.zeros(4))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "states")
        store.save_optimizer_states(path)
        store.barrier()
        if store.rank == 0:
            store.set_optimizer_states(before)
        store.barrier()
        again = store.optimizer_states()
        store.barrier()
        store.load_optimizer_states(path)
    loaded = store.optimizer_states()
    names = ("exp_avg", "exp_avg_sq", "step")
    return [torch.as_tensor(found["w"][name]).float() for found in (before, again, loaded) for name in names]


def wrong_calls():
    store = kvstore.create("dist_sync")
    store.init("w", torch.zeros(3, 2))
    calls = {
        "options": store.options,
        "rate": lambda: store.set_learning_rate(-1.0),
        "unknown": lambda: store.push(np.int64(3), torch.zeros(3, 2)),
        "shape of rows": lambda: store.push("w", torch.zeros(4, 2).to_sparse(1)),
        "shape of target": lambda: store.pull("w", torch.zeros(4, 2).to_sparse(1)),
        "sparse in all": lambda: store.push("w", torch.zeros(3, 2).to_sparse()),
        "kind of key": lambda: store.init([1.5], [torch.zeros(1)]),
        "number beside names": lambda: store.init(7, torch.zeros(1)),
        "both in a call": lambda: store.push(["w", 7], [torch.zeros(3, 2), torch.zeros(1)]),
    }
    found = {}
    for what, call in calls.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the test looks at what it is
            found[what] = [type(error).__name__, str(error)]
    return found


def ignored_targets(store):
    """How often the log says that a target was ignored: once per key."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("paceline").addHandler(handler)
    store.init(["a", "b"], [torch.zeros(2, 2), torch.zeros(2, 2)])
    for _ in range(3):
        store.pull(["a", "b"], [torch.sparse_coo_tensor(size=(2, 2)), torch.sparse_coo_tensor(size=(2, 2))])
    logging.getLogger("paceline").removeHandler(handler)
    return sum("row-sparse out" in one for one in said)


def run_all():
    found = {name: [one.tolist() for one in scenario(name)(kvstore.create("dist_sync"))] for name in SCENARIOS}
    found["types"] = [kvstore.create(name).type for name in ("dist", "Dist_Sync_Device", "dist_device_sync")]
    return found | {"errors": wrong_calls(), "ignored": ignored_targets(kvstore.create("dist_sync"))}


def scenario(name):
    return globals()[name.replace(" ", "_")]


# ---- the tests ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    with LocalJob(WORKERS, 2, timeout_s=60, bigarray_bound=200) as job:
        return job.run(run_all)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("kind", ["local", "device"])
def test_workers_get_what_one_process_gets(found, name, kind):
    wanted = [one.tolist() for one in scenario(name)(kvstore.create(kind))]
    for worker in found:
        assert len(worker[name]) == len(wanted)
        for got, want in zip(worker[name], wanted, strict=True):
            assert torch.allclose(torch.tensor(got), torch.tensor(want), atol=1e-6), (got, want)


def test_rows_for_a_dense_key_count_as_the_dense_gradient():
    by_rows, dense = kvstore.create("local"), kvstore.create("local")
    for store in (by_rows, dense):
        store.set_optimizer("adam", lr=0.1)
        store.init("w", start())
    for step in range(3):
        by_rows.push("w", rows(step))
        dense.push("w", rows(step).to_dense())
    assert torch.equal(pulled(by_rows, "w", start()), pulled(dense, "w", start()))


def test_types_are_the_text_that_was_given(found):
    assert all(worker["types"] == ["dist", "dist_sync_device", "dist_device_sync"] for worker in found)
    given = ["local", "Local_Allreduce_CPU", "local_update_cpu", "device", "local_allreduce_device"]
    assert [kvstore.create(name).type for name in given] == [name.lower() for name in given]


def test_ignored_targets_are_named_once_per_key(found):
    assert [worker["ignored"] for worker in found] == [2, 2]
    assert ignored_targets(kvstore.create("local")) == 2


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("options", "ValueError", "so it has no state or options"),
        ("rate", "ValueError", "not a finite number of 0 or more"),
        ("unknown", "KeyMismatchError", "key 3 is not initialised"),
        ("shape of rows", "ValueError", "(4, 2)"),
        ("shape of target", "ValueError", "(4, 2)"),
        ("sparse in all", "ValueError", "1 sparse dimension"),
        ("kind of key", "TypeError", "keys are int or str"),
        ("number beside names", "TypeError", "key 7 is int, but key 'w' is str: the keys of one store are all int or"),
        ("both in a call", "TypeError", "use one kind, or a second store"),
    ],
)
def test_wrong_calls_are_refused(found, what, kind, words):
    for worker in found:
        assert worker["errors"][what][0] == kind
        assert words in worker["errors"][what][1]


def test_what_a_store_leaves_out_is_named_with_its_type():
    class Half(KVStore):
        type = "half"

    store = Half()
    calls = {
        "init": (1, torch.zeros(1)),
        "push": (1, torch.zeros(1)),
        "pull": (1, torch.zeros(1)),
        "pushpull": (1, torch.zeros(1)),
        "broadcast": (1, torch.zeros(1), torch.zeros(1)),
        "set_optimizer": ("sgd",),
        "set_updater": ("add",),
        "set_options": ([{"lr": 1.0}],),
        "options": (),
        "set_learning_rate": (0.1,),
        "optimizer_states": (),
        "set_optimizer_states": ({},),
        "save_optimizer_states": ("f",),
        "load_optimizer_states": ("f",),
        "set_gradient_compression": ({"type": "2bit"},),
        "row_sparse_pull": (1, torch.zeros(1)),
        "for_optimizer": (),
    }
    for method, arguments in calls.items():
        wanted = "options" if method == "set_learning_rate" else method
        with pytest.raises(NotImplementedError, match=f"a half store has no {wanted}: Half does not define it"):
            getattr(store, method)(*arguments)


def test_a_store_in_use_gives_each_optimizer_another_one():
    store = kvstore.create("local")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    first, second = store.for_optimizer(), store.for_optimizer()
    assert first is store
    assert second is not store
    second.init("w", torch.zeros(2))
    second.push("w", torch.tensor([0.6, 0.4]))
    assert pulled(second, "w", torch.zeros(2)).tolist() == [0.5, 0.0]
    with pytest.raises(KeyMismatchError):
        store.push("w", torch.zeros(2))
    used = kvstore.create("local_update_cpu")
    used.init("w", torch.zeros(2))
    assert used.for_optimizer() is not used
    assert used.for_optimizer().type == "local_update_cpu"


def test_a_store_in_one_process_has_nothing_to_clip():
    with pytest.raises(ValueError, match="a device store has no merged gradient to clip; clip in the worker"):
        kvstore.create("device").for_optimizer(clip_norm=1.0)
