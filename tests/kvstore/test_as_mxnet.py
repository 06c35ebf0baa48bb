"""What MXNet's own tests ask of a store in one process, in our words and through our interface."""

import time

import pytest
import torch

from paceline import kvstore
from paceline.kvstore.base import KVStoreBase

SHAPE = (4, 4)
NUMBERS, NAMES = [5, 7, 11], ["b", "c", "d"]
DEVICES = 4


class SumStore(KVStoreBase):
    """MXNet's ``teststore``: broadcasts and sums, and cannot run an optimizer."""

    def broadcast(self, key, value, out, priority=0):
        for one in out if isinstance(out, list) else [out]:
            one.copy_(value)

    def pushpull(self, key, value, out=None, priority=0):
        total = sum(one.clone() for one in value)
        for one in value if out is None else out:
            one.copy_(total)


@pytest.fixture(params=[(3, NUMBERS), ("a", NAMES)], ids=["int", "str"])
def keys(request):
    return request.param


def full(value):
    return torch.full(SHAPE, float(value))


def made(keys, by_rows=False):
    """A store with one key and a list of keys, all zeros."""
    zeros = full(0).to_sparse(1) if by_rows else full(0)
    store = kvstore.create("local")
    store.init(keys[0], zeros)
    store.init(keys[1], [zeros] * len(keys[1]))
    return store


def pulled(store, key, count=1):
    outs = [torch.empty(SHAPE) for _ in range(count)]
    store.pull(key, outs)
    return outs


def random_rows(seed, dtype=torch.float32):
    """About half of the rows, some of them empty."""
    chance = torch.Generator().manual_seed(seed)
    dense = torch.randn(SHAPE, generator=chance) * (torch.rand(SHAPE[0], 1, generator=chance) < 0.5)
    return dense.to(dtype).to_sparse(1)


def test_a_list_of_keys_may_get_one_tensor_many_times(keys):
    """The same tensor as value of, and as target for, every key."""
    store, out = made(keys), torch.empty(SHAPE)
    store.push(keys[1], [full(4)] * 3)
    store.pull(keys[1], [out] * 3)
    assert torch.equal(out, full(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_rows_of_devices_are_summed_and_come_back_to_each(keys, dtype):
    store, every = kvstore.create("local"), torch.arange(SHAPE[0])
    store.init(keys[0], full(0).to(dtype).to_sparse(1))
    values = [random_rows(seed, dtype) for seed in range(DEVICES)]
    wanted = sum(one.to_dense().double() for one in values)
    store.push(keys[0], values)
    store.row_sparse_pull(keys[0], values, row_ids=[every] * DEVICES)
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 5e-2}.get(dtype, 1e-6)
    assert all(torch.allclose(one.to_dense().double(), wanted, atol=tolerance) for one in values)


def test_rows_of_a_list_of_keys(keys):
    store, every = made(keys, by_rows=True), torch.arange(SHAPE[0])
    many = [[random_rows(DEVICES * number + seed) for seed in range(DEVICES)] for number in range(3)]
    wanted = [sum(one.to_dense() for one in some) for some in many]
    store.push(keys[1], many)
    store.row_sparse_pull(keys[1], many, row_ids=[[every] * DEVICES] * 3)
    for some, want in zip(many, wanted, strict=True):
        assert all(torch.allclose(one.to_dense(), want, atol=1e-6) for one in some)


def test_a_store_of_ones_own_needs_two_methods_and_has_no_optimizer():
    store = KVStoreBase.register(SumStore)()
    try:
        assert kvstore.create("SumStore").type == "sumstore"
    finally:
        del KVStoreBase.registry["sumstore"]
    assert store.stats() == {}
    assert not store.is_capable("optimizer")
    assert (store.rank, store.num_workers) == (0, 1)
    out = torch.empty(1)
    for _ in range(2):  # unlike our own stores it may do so again
        store.broadcast(1, torch.ones(1), out)
    outs = [torch.empty(1)] * 2
    store.pushpull(1, [out, out.clone()], out=outs)
    assert outs[0].item() == 2
    store.pushpull(1, outs)
    assert outs[0].item() == 4
    with pytest.raises(NotImplementedError, match="a sumstore store has no set_optimizer"):
        store.set_optimizer("sgd")


# ---- where MXNet is slow, or says nothing -------------------------------------------------------------------------


def test_pulling_a_whole_table_as_rows_costs_little_more_than_its_bytes():
    store, table = kvstore.create("local"), torch.randn(10_000, 16)
    store.init("e", table.to_sparse(1))
    out = torch.sparse_coo_tensor(size=table.shape)

    def seconds(job):
        best = float("inf")
        for _ in range(3):
            begin = time.process_time()
            job()
            best = min(best, time.process_time() - begin)
        return best

    pull = seconds(lambda: store.pull("e", out, ignore_sparse=False))
    assert torch.equal(out.to_dense(), table)
    assert pull < seconds(lambda: table.to_sparse(1)) / 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "rmsprop", "lamb"])
def test_rows_and_dense_gradients_of_half_precision_train_a_float32_master(name, dtype):
    """Two devices, rows in one key and dense values in another; the float32 run is the measure."""
    half, single = kvstore.create("local"), kvstore.create("local")
    start = torch.arange(16.0).view(SHAPE) / 16
    for store, of in ((half, dtype), (single, torch.float32)):
        store.set_optimizer(name, lr=0.01, multi_precision=True)
        store.init(["w", "e"], [start.to(of), start.to(of).to_sparse(1)])
    for step in range(20):
        grads = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * step + i)).to(dtype) for i in (0, 1)]
        for store, of in ((half, dtype), (single, torch.float32)):
            dense = [one.to(of) for one in grads]
            store.push(["w", "e"], [dense, [one.to_sparse(1) for one in dense]])
    for key in "we":
        got, want = pulled(half, key)[0], pulled(single, key)[0]
        assert (got - want).abs().max() < (0.02 if dtype == torch.float16 else 0.1)
        assert (want - start).abs().max() > 1e-3
    masters = [half.optimizer_states()[key]["master"].dtype for key in "we"]
    assert masters == [torch.float32, torch.float32]
