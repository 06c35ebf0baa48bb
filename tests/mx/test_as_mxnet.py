"""What MXNet's own tests ask of ``Trainer`` and of Gluon's helpers, in our words; and two trainers on one store."""

import copy

import pytest
import torch
from torch import nn

from paceline import kvstore
from paceline.errors import PacelineError
from paceline.gluon import Trainer, backward, clip_global_norm, replicate, split_and_load, split_data
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.inprocess import LocalStore
from paceline.mx.context import cpu
from paceline.mx.gluon.store_choice import Traits, update_on_store

TWO = [cpu(0), cpu(1)]


class Value(nn.Module):
    """One parameter ``x`` of zeros, by itself."""

    def __init__(self, *shape):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(*shape))

    def forward(self):
        return self.x


class SumStore(KVStoreBase):
    """Sums, and cannot run an optimizer."""

    def broadcast(self, key, value, out, priority=0):
        for one, outs in zip(value, out, strict=True):
            for target in outs:
                target.copy_(one)

    def pushpull(self, key, value, out=None, priority=0):
        for some in value:
            total = sum(one.clone() for one in some)
            for one in some:
                one.copy_(total)


class Faraway(LocalStore):
    """A store whose type says that it is distributed."""

    _TYPE = "dist_sync"


def ones_backward(net):
    """A gradient of one in every element, on every device."""
    for param in net.replicas:
        param().sum().backward()


def table(sparse=True):
    torch.manual_seed(0)
    return nn.Embedding(10, 3, sparse=sparse)


# ---- the trainer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["teststore", "device"])
def test_two_devices_step_by_the_sum(store):
    net = replicate(Value(10), TWO)
    trainer = Trainer(
        net, "sgd", {"learning_rate": 1.0, "momentum": 0.5}, SumStore() if store == "teststore" else store
    )
    ones_backward(net)
    trainer.step(1)
    assert trainer.update_on_kvstore is (store == "device")
    assert torch.equal(net.collect_params()["x"].data(cpu(1)), torch.full((10,), -2.0))
    net.collect_params()["x"].lr_mult = 0.5
    ones_backward(net)
    trainer.step(1)
    # Torch's momentum: the buffer holds gradients, so that the new rate counts for all of them.
    assert torch.equal(net.collect_params()["x"].data(cpu(1)), torch.full((10,), -3.5))


def test_a_store_without_optimizers_refuses_to_update():
    with pytest.raises(ValueError, match="cannot run an optimizer"):
        Trainer(replicate(Value(10), TWO), "sgd", kvstore=SumStore(), update_on_kvstore=True)


def test_states_are_the_same_after_saving_and_loading(tmp_path):
    net = replicate(Value(10), TWO)
    trainer = Trainer(net, "sgd", {"lr": 1.0, "momentum": 0.5})
    ones_backward(net)
    trainer.step(1)
    before = trainer.kvstore.optimizer_states()
    trainer.save_states(tmp_path / "states")
    ones_backward(net)
    trainer.step(1)
    trainer.load_states(tmp_path / "states")
    assert torch.equal(trainer.kvstore.optimizer_states()["x"]["momentum_buffer"], before["x"]["momentum_buffer"])
    # Multipliers still belong to the parameters after loading.
    net.collect_params()["x"].lr_mult = 2.0
    value = net.collect_params()["x"].data().clone()
    ones_backward(net)
    trainer.step(1)
    assert torch.allclose(net.collect_params()["x"].data(), value - 2.0 * (2.0 * 0.5 + 2.0))


@pytest.mark.parametrize("on_store", [True, False])
def test_a_scheduler_is_asked_for_every_step(on_store):
    net = replicate(Value(10), TWO)
    options = {"learning_rate": 1.0, "lr_scheduler": lambda step: 0.1 ** ((step - 1) // 2)}
    trainer = Trainer(net, "sgd", options, update_on_kvstore=on_store)
    for step in range(6):
        ones_backward(net)
        trainer.step(1)
        assert trainer.learning_rate == pytest.approx(0.1 ** (step // 2))
    assert torch.allclose(net.collect_params()["x"].data(), torch.full((10,), -4.44))


# ---- where rows are updated ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "weights", "gradients", "wanted", "answer"),
    [
        (kind, weights, gradients, wanted, answer)
        for kind in ("local",)
        for weights, gradients, wanted, answer in (
            (False, False, True, True),
            (False, False, False, False),
            (False, False, None, True),
            (False, True, None, False),
            (False, True, True, True),
            (False, True, False, False),
            (True, True, None, True),
            (True, True, True, True),
            (True, True, False, "update_on_kvstore=False is impossible: row-sparse parameters"),
        )
    ]
    + [
        ("dist_sync", False, True, None, True),
        ("dist_sync", False, True, True, True),
        ("dist_sync", False, True, False, "update_on_kvstore=False is impossible: row-sparse gradients"),
        ("dist_sync", True, False, False, "update_on_kvstore=False is impossible: row-sparse parameters"),
        ("dist_sync", False, False, False, False),
        ("third", False, True, None, "does not support rows"),
        ("third", True, False, None, "does not support rows"),
    ],
)
def test_where_rows_are_updated_is_mxnets_table(store, weights, gradients, wanted, answer):
    made = {"dist_sync": Faraway, "third": SumStore}.get(store, lambda: kvstore.create(store))()
    traits = Traits(1, sparse_weights=weights, sparse_gradients=gradients)
    if isinstance(answer, bool):
        assert update_on_store(wanted, made, traits, {}) is answer
        return
    with pytest.raises(ValueError, match=answer):
        update_on_store(wanted, made, traits, {})


def test_the_environment_says_nothing_about_rows():
    forbidden = {"MXNET_UPDATE_ON_KVSTORE": "0"}
    assert update_on_store(None, Faraway(), Traits(1, sparse_gradients=True), forbidden)
    assert update_on_store(None, kvstore.create("local"), Traits(1, sparse_weights=True), forbidden)


def test_row_sparse_parameters_need_a_store_also_on_one_device():
    net = replicate(table(), cpu(0))
    net.collect_params().setattr("stype", "row_sparse")
    with pytest.raises(TypeError, match="kept in a store"):
        Trainer(net, "sgd", kvstore=None)
    with pytest.raises(ValueError, match="storage type 'rows' is unknown"):
        net.collect_params()["weight"].stype = "rows"
    trainer = Trainer(net, "sgd", {"lr": 0.5}, kvstore="local")
    before = net.replicas[0].weight.detach().clone()
    net(torch.tensor([1, 1, 4])).sum().backward()
    trainer.step(1)
    assert trainer.update_on_kvstore
    before[[1, 4]] -= torch.tensor([[1.0], [0.5]])
    assert torch.allclose(net.replicas[0].weight.detach(), before)


@pytest.mark.parametrize(("kind", "on_store"), [("local", True), ("local", None), (None, None)])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_rows_train_alike_wherever_they_are_updated(kind, on_store, name):
    """Lazily: only rows with a gradient move, and only their state. One device is the measure."""
    options = {"lr": 0.1, **({"momentum": 0.9} if name == "sgd" else {})}
    alone = replicate(table(), cpu(0))
    one = Trainer(alone, name, options, "local", compression_params={"type": "fp16"}, update_on_kvstore=True)
    assert one.kvstore is not None
    contexts = TWO if kind is not None else cpu(0)
    net = replicate(table(), contexts)
    trainer = Trainer(net, name, options, kind, update_on_kvstore=on_store)
    assert net.collect_params()["weight"].grad_stype == "row_sparse"
    assert trainer.update_on_kvstore is bool(on_store)
    for step in range(5):
        ids = torch.randint(0, 10, (4, 2), generator=torch.Generator().manual_seed(step))
        alone(ids).square().sum().backward()
        one.step(4)
        outputs = net(split_and_load(ids, contexts))
        backward([out.square().sum() for out in outputs] if kind is not None else outputs[0].square().sum())
        trainer.step(4)
    for replica in net.replicas:
        assert torch.allclose(replica.weight, alone.replicas[0].weight, atol=1e-5)


# ---- several trainers, and whatever else, on one store ------------------------------------------------------------


class Gan:
    """A generator and a discriminator with an optimizer each, by hand in one process."""

    def __init__(self):
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(2, 3), nn.Linear(3, 1)

    def losses(self, generate, discriminate, noise, real):
        fake = generate(noise)
        seen = torch.nn.functional.softplus(-discriminate(real)) + torch.nn.functional.softplus(
            discriminate(fake.detach())
        )
        return seen.sum(), lambda: torch.nn.functional.softplus(-discriminate(fake)).sum()


@pytest.mark.parametrize("make", [lambda: kvstore.create("device"), SumStore])
def test_two_trainers_share_a_store_with_numbered_keys_beside_them(make):
    """Both networks have parameters of the same names, and unlike optimizers."""
    store, gan, wanted = make(), Gan(), Gan()
    ours = isinstance(store, SumStore) is False
    if ours:
        store.init([0, 1], [torch.zeros(2), torch.ones(2)])
    generator, discriminator = replicate(gan.generator, TWO), replicate(gan.discriminator, TWO)
    steps_g = Trainer(generator, "adam", {"lr": 0.02}, store)
    steps_d = Trainer(discriminator, "sgd", {"lr": 0.1, "momentum": 0.9}, store)
    adam = torch.optim.Adam(wanted.generator.parameters(), lr=0.02)
    sgd = torch.optim.SGD(wanted.discriminator.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        chance = torch.Generator().manual_seed(step)
        noise, real = torch.randn(4, 2, generator=chance), torch.randn(4, 3, generator=chance)
        seen, fooled = wanted.losses(wanted.generator, wanted.discriminator, noise, real)
        for optimizer, loss in ((sgd, lambda seen=seen: seen), (adam, fooled)):
            for one in (sgd, adam):
                one.zero_grad()
            (loss() / 4).backward()
            optimizer.step()
        parts = zip(split_and_load(noise, TWO), split_and_load(real, TWO), strict=True)
        both = [gan.losses(generator, discriminator, *part) for part in parts]
        backward([seen for seen, _ in both])
        steps_d.step(4)
        backward([fooled() for _, fooled in both])
        discriminator.zero_grad()
        steps_g.step(4)
        if ours:
            store.push([0, 1], [torch.full((2,), float(step)), [torch.ones(2)] * 2])
    for net, want in ((generator, wanted.generator), (discriminator, wanted.discriminator)):
        for replica in net.replicas:
            for got, right in zip(replica.parameters(), want.parameters(), strict=True):
                assert torch.allclose(got, right, atol=1e-5)
    if ours:
        outs = [torch.empty(2), torch.empty(2)]
        store.pull([0, 1], outs)
        assert [one.tolist() for one in outs] == [[19, 19], [2, 2]]


def test_a_trainer_on_a_trainers_store_is_apart_from_it():
    first, second = replicate(Value(2), TWO), replicate(Value(2), TWO)
    one = Trainer(first, "sgd", {"lr": 1.0}, "local")
    other = Trainer(second, "sgd", {"lr": 0.5}, one.kvstore)
    for net, trainer in ((first, one), (second, other)):
        ones_backward(net)
        trainer.step(1)
    assert [net.replicas[1].x.tolist() for net in (first, second)] == [[-2, -2], [-1, -1]]


def test_what_is_pushed_beside_a_trainer_is_not_divided_by_its_batch_size():
    store, net = kvstore.create("local"), replicate(Value(2), TWO)
    trainer = Trainer(net, "sgd", {"lr": 1.0}, store)
    store.init("mean", torch.zeros(2))
    ones_backward(net)
    trainer.step(100)
    store.push("mean", torch.ones(2))
    store.pull("mean", out := torch.empty(2))
    assert out.tolist() == [-1.0, -1.0]


# ---- clipping -----------------------------------------------------------------------------------------------------


def clipped_by_torch(net, norm, value):
    if value is not None:
        nn.utils.clip_grad_value_(net.parameters(), value)
    if norm is not None:
        nn.utils.clip_grad_norm_(net.parameters(), norm)


@pytest.mark.parametrize("bounds", [(0.3, None), (None, 0.05), (0.3, 0.1)])
@pytest.mark.parametrize(("kind", "on_store"), [("device", True), ("local", False), ("third", None), (None, None)])
def test_clipping_is_torchs_on_the_joined_batch(kind, on_store, bounds):
    norm, value = bounds
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1), nn.Flatten(0))
    net = replicate(copy.deepcopy(reference), TWO if kind is not None else cpu(0))
    store = SumStore() if kind == "third" else kind
    bound = {"clip_grad_norm": norm, "clip_grad_value": value}
    trainer = Trainer(net, "adam", {"lr": 0.01, "rescale_grad": 2.0}, store, update_on_kvstore=on_store, **bound)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
    for step in range(20):
        chance = torch.Generator().manual_seed(step)
        data, label = torch.randn(8, 4, generator=chance), 3 * torch.randn(8, generator=chance)
        optimizer.zero_grad()
        (2 * (reference(data) - label).square().mean()).backward()
        clipped_by_torch(reference, norm, value)
        optimizer.step()
        parts = zip(split_and_load(data, net.contexts), split_and_load(label, net.contexts), strict=True)
        backward([(net(x) - y).square().sum() for x, y in parts])
        trainer.step(8)
    for replica in net.replicas:
        for got, want in zip(replica.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("on_store", [True, False])
def test_rows_count_in_the_norm(on_store):
    net, reference = replicate(table(), TWO), table(sparse=False)
    trainer = Trainer(net, "sgd", {"lr": 0.5}, "local", update_on_kvstore=on_store, clip_grad_norm=0.1)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(5):
        ids = torch.randint(0, 10, (4, 2), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        reference(ids).square().sum().div(4).backward()
        clipped_by_torch(reference, 0.1, None)
        optimizer.step()
        backward([net(one).square().sum() for one in split_and_load(ids, TWO)])
        trainer.step(4)
    assert torch.allclose(net.replicas[1].weight, reference.weight, atol=1e-6)


@pytest.mark.parametrize("bound", ["clip_grad_norm", "clip_grad_value"])
def test_bounds_that_mean_nothing_are_refused(bound):
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"{bound} is .*above 0"):
            Trainer(replicate(Value(2), TWO), "sgd", **{bound: value})


def test_clipping_in_other_stores_that_update_is_refused_with_the_way_out():
    traits = Traits(1, clips=True)
    assert update_on_store(None, Faraway(), traits, {}) is False
    with pytest.raises(ValueError, match="let the workers update: update_on_kvstore=False"):
        update_on_store(True, Faraway(), traits, {})
    with pytest.raises(ValueError, match="clip this worker's own gradients"):
        update_on_store(None, Faraway("dist_async"), traits, {})


def test_norm_of_rows_is_clipped_in_place():
    """Rows that occur twice count as their sum."""
    arrays = [torch.ones(3, 3).to_sparse(1), torch.ones(4, 4)]
    assert clip_global_norm(arrays, 1.0) == 5.0
    assert torch.allclose(arrays[0].to_dense(), torch.ones(3, 3) / 5)
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 1), (3, 1), check_invariants=True)
    assert clip_global_norm([twice], 1.0) == 2.0
    assert torch.allclose(twice.to_dense().flatten(), torch.tensor([0.0, 1.0, 0.0]))
    with pytest.warns(UserWarning, match="nothing was clipped"):
        clip_global_norm([arrays[1], torch.tensor([1.0, float("nan")])], 2.0)


# ---- batches, and networks without shapes -------------------------------------------------------------------------


@pytest.mark.parametrize(("slices", "axis", "even"), [(8, 0, True), (3, 1, True), (4, 1, False), (15, 1, False)])
def test_slices_make_the_batch_again(slices, axis, even):
    batch = torch.rand(128, 33, 64)
    parts = split_data(batch, slices, axis, even_split=even)
    assert len(parts) == slices
    assert torch.equal(torch.cat(parts, dim=axis), batch)


def test_a_batch_smaller_than_the_devices_trains():
    """The last device has nothing to do: its gradient is zero."""
    net = replicate(nn.Linear(2, 1, bias=False), [cpu(0), cpu(1), cpu(2)])
    trainer, before = Trainer(net, "sgd", {"lr": 1.0}), net.replicas[0].weight.detach().clone()
    backward([out.sum() for out in net(split_and_load(torch.ones(2, 2), net.contexts, even_split=False))])
    trainer.step(2)
    assert all(torch.allclose(one.weight, before - 1.0) for one in net.replicas)


def test_a_network_without_shapes_wants_a_forward_pass_first():
    net = replicate(nn.Sequential(nn.LazyLinear(3)), TWO)
    trainer = Trainer(net, "sgd", {"lr": 1.0})
    for call in (lambda: trainer.step(1), lambda: net.collect_params()["0.weight"].shape):
        with pytest.raises(PacelineError, match=r"'0.weight' has no shape before the first batch: call the network"):
            call()
    with pytest.raises(ValueError, match="run one forward pass first"):
        kvstore.create("local").init("w", nn.LazyLinear(3).weight)
