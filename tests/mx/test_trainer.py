import copy

import pytest
import torch
from torch import nn

from paceline.errors import KeyMismatchError, PacelineError, StaleGradientError
from paceline.gluon import SyncBatchNorm, Trainer, backward, clip_global_norm, replicate, split_and_load
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.inprocess import DeviceStore, LocalStore
from paceline.mx.context import cpu, gpu, num_gpus
from paceline.testing.one_process import OneProcess
from paceline.updaters import DCASGD, LAMB, NAG, SGLD, Ftrl, MXNetSGD, SignSGD, Signum

STEPS = 30


class ThirdParty(KVStoreBase):
    """All that somebody else's store has to have."""

    def broadcast(self, key, value, out, priority=0):
        for one, outs in zip(value, out, strict=True):
            for target in outs:
                target.copy_(one)

    def pushpull(self, key, value, out=None, priority=0):
        for values, outs in zip(value, out or value, strict=True):
            total = torch.stack([one.cpu() for one in values]).sum(0)
            for target in outs:
                target.copy_(total)


class TiedEmbedding(nn.Module):
    """Row-sparse gradients, and one matrix used twice."""

    def __init__(self, sparse):
        super().__init__()
        self.embed = nn.Embedding(12, 6, sparse=sparse)
        self.hidden = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.hidden.weight

    def forward(self, x):
        return self.again(torch.tanh(self.hidden(self.embed(x).mean(1)))).sum(1)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def dense_batches(size=12):
    return [(torch.randn(size, 6), torch.randn(size)) for _ in range(STEPS)]


def id_batches(size=12):
    return [(torch.randint(0, 12, (size, 3)), torch.randn(size)) for _ in range(STEPS)]


def train_plainly(net, optimizer, batches):
    for data, label in batches:
        optimizer.zero_grad()
        (net(data) - label).square().mean().backward()
        optimizer.step()
    return net


def train_replicated(net, trainer, batches, weights=None):
    for data, label in batches:
        slices = split_and_load(data, net.contexts, work_load_list=weights)
        labels = split_and_load(label, net.contexts, work_load_list=weights)
        backward([(out - want).square().sum() for out, want in zip(net(slices), labels, strict=True)])
        trainer.step(len(data))
    return net


def assert_equal_weights(net, reference, atol=1e-5):
    for name, param in reference.named_parameters():
        for value in net.collect_params()[name].list_data():
            assert torch.allclose(value, param, atol=atol), name


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "lamb": (LAMB, {"lr": 0.02, "weight_decay": 0.01}),
}
WEIGHTS = {1: [1], 2: [3, 1], 3: [1, 2, 3]}
STORES = ["local", "third", "local-update"]
KNOW_ROWS = ["local", "local-update"]


def store_options(store):
    if store == "third":
        return {"kvstore": ThirdParty()}
    if store == "local-update":
        return {"kvstore": DeviceStore(), "update_on_kvstore": False}
    return {"kvstore": LocalStore()}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("devices", "uneven"), [(1, False), (2, True), (3, True)])
def test_weights_equal_the_single_device_run(store, name, devices, uneven):
    torch.manual_seed(1)
    reference, batches = mlp(), dense_batches()
    net = replicate(copy.deepcopy(reference), [cpu(i) for i in range(devices)])
    cls, options = OPTIMIZERS[name]
    trainer = Trainer(net, name, options, **store_options(store))
    train_replicated(net, trainer, batches, WEIGHTS[devices] if uneven else None)
    assert_equal_weights(net, train_plainly(reference, cls(reference.parameters(), **options), batches))


@pytest.mark.parametrize("devices", [2, 3])
def test_synchronised_batch_norm_trains_as_one_device(devices):
    torch.manual_seed(1)
    reference, batches = normed(), dense_batches()
    net = replicate(SyncBatchNorm.convert(copy.deepcopy(reference)), [cpu(i) for i in range(devices)])
    train_replicated(net, Trainer(net, "sgd", {"lr": 0.1, "momentum": 0.9}), batches, WEIGHTS[devices])
    wanted = train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), batches)
    assert_equal_weights(net, wanted, atol=1e-4)
    assert torch.allclose(net.state_dict()["1.running_var"], wanted[1].running_var, atol=1e-4)


def test_plain_batch_norm_uses_the_statistics_of_its_slice():
    torch.manual_seed(1)
    net, data = replicate(normed(), [cpu(0), cpu(1)]), torch.randn(8, 6)
    alone = copy.deepcopy(net.replicas[1])
    assert torch.allclose(net(split_and_load(data, net.contexts))[1], alone(data[4:]), atol=1e-6)


@pytest.mark.parametrize(("store", "sparse"), [*((one, False) for one in STORES), *((one, True) for one in KNOW_ROWS)])
def test_tied_weights_and_sparse_embeddings(store, sparse):
    torch.manual_seed(1)
    reference, batches = TiedEmbedding(False), id_batches()
    mine = TiedEmbedding(sparse)
    mine.load_state_dict(reference.state_dict())
    net = replicate(mine, [cpu(0), cpu(1)])
    train_replicated(net, Trainer(net, "sgd", {"lr": 0.1}, **store_options(store)), batches, [3, 1])
    assert_equal_weights(net, train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.1), batches))
    for replica in net.replicas:
        assert replica.again.weight is replica.hidden.weight


def test_sparse_adam_on_several_devices_is_lazy_adam_on_one():
    torch.manual_seed(1)
    table, batches = nn.Embedding(12, 4, sparse=True), id_batches()
    net = replicate(nn.Sequential(copy.deepcopy(table)), [cpu(0), cpu(1)])
    trainer = Trainer(net, "adam", {"lr": 0.05})
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.05)
    for ids, _ in batches:
        optimizer.zero_grad()
        table(ids).square().sum().div(len(ids)).backward()
        optimizer.step()
        backward([one.square().sum() for one in net(split_and_load(ids, net.contexts))])
        trainer.step(len(ids))
    assert all(torch.allclose(one.weight, table.weight, atol=1e-5) for (one,) in net.replicas)


@pytest.mark.parametrize(("name", "options"), [("sgd", {"lr": 0.1}), ("adam", {"lr": 0.1}), ("adamw", {"lr": 0.1})])
def test_rows_without_a_gradient_wait_as_with_lazy_update(name, options):
    """Weight decay, and Adam's means, change only the rows of a sparse gradient; a dense one changes all."""
    nets = {sparse: replicate(nn.Sequential(nn.Embedding(6, 2, sparse=sparse)), cpu()) for sparse in (True, False)}
    for sparse, net in nets.items():
        before = net.replicas[0][0].weight.detach().clone()
        trainer = Trainer(net, name, options | {"wd": 0.1, "lazy_update": True})
        for rows in ([0, 1], [1, 2], [1]):
            net(torch.tensor(rows)).square().sum().backward()
            trainer.step(1)
        changed = (net.replicas[0][0].weight != before).any(1).tolist()
        assert changed == [True, True, True, *[not sparse] * 3]


def test_updates_that_are_not_lazy_are_refused_with_the_way_out():
    net = replicate(nn.Embedding(6, 2, sparse=True), cpu())
    with pytest.raises(ValueError, match="make the gradient dense: sparse=False"):
        Trainer(net, "adam", {"lr": 0.1, "lazy_update": False})


def test_class_and_instance_are_as_good_as_a_name():
    torch.manual_seed(1)
    start, batches = mlp(), dense_batches()
    nets = [replicate(copy.deepcopy(start), [cpu(0), cpu(1)]) for _ in range(3)]
    instance = torch.optim.Adam(nets[2].replicas[0].parameters(), lr=0.01)
    trainers = [Trainer(nets[0], "adam", {"learning_rate": 0.01}), Trainer(nets[1], torch.optim.Adam, {"lr": 0.01})]
    for net, trainer in zip(nets, [*trainers, Trainer(nets[2], instance)], strict=True):
        train_replicated(net, trainer, batches)
    for net in nets[1:]:
        assert_equal_weights(net, nets[0].replicas[0], atol=0)


@pytest.mark.parametrize("store", STORES)
def test_param_groups_and_schedulers_of_an_instance_count(store):
    torch.manual_seed(1)
    reference, batches = mlp(), dense_batches()
    net = replicate(copy.deepcopy(reference), [cpu(0), cpu(1)])

    def optimizer_of(model):
        groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}]
        made = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
        return made, torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.9)

    theirs, their_schedule = optimizer_of(reference)
    mine, my_schedule = optimizer_of(net.replicas[0])
    trainer = Trainer(net, mine, **store_options(store))
    for batch in batches:
        train_plainly(reference, theirs, [batch])
        their_schedule.step()
        train_replicated(net, trainer, [batch])
        my_schedule.step()
    assert_equal_weights(net, reference)


@pytest.mark.parametrize("store", STORES)
def test_learning_rate_and_multipliers_count_from_the_next_step(store):
    torch.manual_seed(1)
    reference, batches = mlp(), dense_batches()
    net = replicate(copy.deepcopy(reference), [cpu(0), cpu(1)])
    trainer = Trainer(net, "sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, **store_options(store))
    optimizer = torch.optim.SGD(
        [{"params": [one]} for one in reference.parameters()], lr=0.1, momentum=0.9, weight_decay=0.1
    )
    first, bias = net.collect_params()["0.weight"], net.collect_params()["0.bias"]
    for step, batch in enumerate(batches):
        if step == 5:
            first.lr_mult, bias.wd_mult = 0.5, 0.0
        if step == 10:
            trainer.set_learning_rate(0.02)
        rate = 0.02 if step >= 10 else 0.1
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = rate * (0.5 if index == 0 and step >= 5 else 1.0)
            group["weight_decay"] = 0.0 if index == 1 and step >= 5 else 0.1
        train_plainly(reference, optimizer, [batch])
        train_replicated(net, trainer, [batch])
    assert trainer.learning_rate == 0.02
    assert_equal_weights(net, reference)


@pytest.mark.parametrize("store", STORES)
def test_batch_size_may_change(store):
    torch.manual_seed(1)
    reference = mlp()
    batches = [dense_batches(size)[0] for size in (12, 8, 5, 12, 2)]
    net = replicate(copy.deepcopy(reference), [cpu(0), cpu(1)])
    trainer = Trainer(net, "sgd", {"lr": 0.1, "momentum": 0.9}, **store_options(store))
    train_replicated(net, trainer, batches, [1, 1])
    assert_equal_weights(
        net, train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), batches)
    )


def test_scheduler_function_sets_the_rate():
    net = replicate(nn.Linear(1, 1), cpu())
    trainer = Trainer(net, "sgd", {"lr_scheduler": lambda num_update: 1.0 / num_update})
    rates = []
    for _ in range(3):
        net.backward(net([torch.ones(1, 1)]))
        trainer.step(1)
        rates.append(trainer.learning_rate)
    assert rates == [1.0, 1 / 2, 1 / 3]
    with pytest.raises(ValueError, match="lr_scheduler"):
        trainer.set_learning_rate(0.1)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("other", STORES)
def test_saved_states_go_on_in_any_store(store, other, tmp_path):
    torch.manual_seed(1)
    start, batches = mlp(), dense_batches()[:8]

    def run(net, kind):
        return Trainer(net, "adam", {"lr": 0.05}, **store_options(kind))

    whole = replicate(copy.deepcopy(start), [cpu(0), cpu(1)])
    train_replicated(whole, run(whole, store), batches)
    half = replicate(copy.deepcopy(start), [cpu(0), cpu(1)])
    trainer = run(half, store)
    train_replicated(half, trainer, batches[:4])
    trainer.save_states(tmp_path / "states")
    resumed = replicate(copy.deepcopy(half.replicas[0]), [cpu(0), cpu(1), cpu(2)])
    trainer = run(resumed, other)
    trainer.load_states(tmp_path / "states")
    train_replicated(resumed, trainer, batches[4:])
    assert_equal_weights(resumed, whole.replicas[0])


def test_gradients_can_be_clipped_between_allreduce_and_update():
    torch.manual_seed(1)
    reference, (data, label) = mlp(), dense_batches()[0]
    net = replicate(copy.deepcopy(reference), [cpu(0), cpu(1)])
    trainer = Trainer(net, "sgd", {"lr": 1.0}, update_on_kvstore=False)
    outputs = net(split_and_load(data, net.contexts))
    backward([(o - y).square().sum() for o, y in zip(outputs, split_and_load(label, net.contexts), strict=True)])
    trainer.allreduce_grads()
    norms = [clip_global_norm([p.grad(c) for p in net.collect_params().values()], 1.2) for c in net.contexts]
    trainer.update(1)
    (reference(data) - label).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.2)
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    assert norms == pytest.approx([norm.item()] * 2, rel=1e-5)
    assert_equal_weights(net, reference)


@pytest.mark.parametrize("store", KNOW_ROWS)
def test_compression_works_with_every_way_to_update(store):
    torch.manual_seed(1)
    net, data = replicate(nn.Linear(4, 1, bias=False), [cpu(0), cpu(1)]), torch.randn(64, 4)
    label = data @ torch.tensor([1.0, -2.0, 0.5, 3.0])
    compression = {"type": "2bit", "threshold": 64.0}
    trainer = Trainer(net, "sgd", {"lr": 0.02}, compression_params=compression, **store_options(store))
    for _ in range(400):
        outputs = net(split_and_load(data, net.contexts))
        targets = split_and_load(label, net.contexts)
        backward([(o.flatten() - y).square().sum() for o, y in zip(outputs, targets, strict=True)])
        trainer.step(64)
    assert torch.allclose(net.replicas[1].weight.flatten(), torch.tensor([1.0, -2.0, 0.5, 3.0]), atol=0.15)


def test_lazy_networks_train():
    torch.manual_seed(1)
    net = replicate(nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1), nn.Flatten(0)), [cpu(0), cpu(1)])
    train_replicated(net, Trainer(net.collect_params(), "sgd", {"lr": 0.1}), dense_batches())
    assert torch.equal(net.replicas[0][2].weight, net.replicas[1][2].weight)


def test_bfloat16_weights_with_a_float32_master_follow_float32():
    torch.manual_seed(1)
    reference, batches = mlp(), dense_batches()
    net = replicate(copy.deepcopy(reference).bfloat16(), [cpu(0), cpu(1)])
    trainer = Trainer(net, "sgd", {"lr": 0.01, "multi_precision": True})
    train_replicated(net, trainer, [(data.bfloat16(), label.bfloat16()) for data, label in batches])
    train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.01), batches)
    for name, param in reference.named_parameters():
        assert torch.allclose(net.collect_params()[name].data().float(), param, atol=0.01)


@pytest.mark.parametrize("store", STORES)
def test_grad_scaler_skips_overflown_steps(store):
    torch.manual_seed(1)
    reference, batches = mlp(), dense_batches()[:6]
    net = replicate(copy.deepcopy(reference), [cpu(0), cpu(1)])
    trainer = Trainer(net, "sgd", {"lr": 0.1}, **store_options(store))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, (data, label) in enumerate(batches):
        outputs = net(split_and_load(data, net.contexts))
        losses = [(o - y).square().sum() for o, y in zip(outputs, split_and_load(label, net.contexts), strict=True)]
        factor = float("inf") if step == 2 else 1.0
        backward([scaler.scale(one) * factor for one in losses])
        trainer.step(len(data), scaler=scaler)
    sound = [one for step, one in enumerate(batches) if step != 2]
    assert scaler.get_scale() == 512.0
    assert_equal_weights(net, train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.1), sound))


# --- what a user gets wrong ----------------------------------------------------------------------------------------


@pytest.fixture
def two():
    torch.manual_seed(1)
    return replicate(mlp(), [cpu(0), cpu(1)])


@pytest.mark.parametrize("store", STORES)
def test_step_before_backward_is_refused(two, store):
    trainer = Trainer(two, "sgd", {"lr": 0.1}, **store_options(store))
    with pytest.raises(StaleGradientError, match=r"'0.weight' on cpu\(0\), cpu\(1\); .* and 1 more"):
        trainer.step(1)


@pytest.mark.parametrize("store", STORES)
def test_stale_gradients_are_found_at_every_step(store):
    net = replicate(nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]), [cpu(0), cpu(1)])
    trainer = Trainer(net, "sgd", {"lr": 1.0, "momentum": 0.9}, **store_options(store))

    def go(*layers):
        for replica in net.replicas:
            for layer in layers:
                replica[layer](torch.ones(1, 2)).sum().backward()

    go(0, 1)
    trainer.step(1)
    before = net.collect_params()["1.weight"].data().clone()
    go(0)
    with pytest.raises(StaleGradientError, match=r"'1.weight'"):
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)
    assert torch.equal(net.collect_params()["1.weight"].data(cpu(1)), before)
    go(0)
    net.replicas[0][1](torch.ones(1, 2)).sum().backward()
    with pytest.raises(StaleGradientError, match=r"into '1.weight' on cpu\(1\); '1.bias' on cpu\(1\)\."):
        trainer.step(1)


def test_gradients_add_up_until_the_step_uses_them(two):
    trainer, bias = Trainer(two, "sgd", {"lr": 0.1}), two.collect_params()["2.bias"]
    for total in (3.0, 6.0):
        two.backward(two([torch.ones(3, 6), torch.ones(1, 6)]))
        assert bias.grad(cpu(0)).item() == total
    trainer.step(8)
    assert bias.grad(cpu(0)).item() == 0.0
    bias.grad_req = "add"
    two.backward(two([torch.ones(3, 6), torch.ones(1, 6)]))
    trainer.step(8)
    assert bias.grad(cpu(0)).item() == 3.0
    trainer.zero_grad()
    assert bias.grad(cpu(0)).item() == 0.0


@pytest.mark.parametrize("store", STORES)
def test_values_set_after_the_first_step_reach_the_store(two, store):
    trainer = Trainer(two, "sgd", {"lr": 1.0}, **store_options(store))
    bias = two.collect_params()["2.bias"]
    for _ in range(2):
        bias.set_data(torch.tensor([5.0]))
        two.backward(two([torch.ones(1, 6), torch.ones(1, 6)]))
        trainer.step(2)
        assert bias.data(cpu(1)).item() == pytest.approx(4.0)


@pytest.mark.parametrize("store", [LocalStore, DeviceStore])
def test_store_of_a_trainer_takes_a_scripts_own_keys_numbers_and_names(two, store):
    own = store()
    trainer = Trainer(two, "sgd", {"lr": 1.0}, own, update_on_kvstore=False)
    for step in range(2):
        two.backward(two([torch.ones(1, 6), torch.ones(1, 6)]))
        trainer.step(2)
        if not step:
            own.init([0, 1, 2], [torch.zeros(2)] * 3)
            own.init("own", torch.zeros(2))
    assert trainer.kvstore is own
    with pytest.raises(TypeError, match="the keys of one store are all int or all str"):
        own.init([3, "other"], [torch.zeros(1)] * 2)
    for key in (1, "own"):
        own.push(key, torch.ones(2))
        own.pull(key, out := torch.empty(2))
        assert out.tolist() == [1, 1]


@pytest.mark.parametrize("batch_size", [0, -1, float("nan")])
def test_senseless_batch_size_is_refused(two, batch_size):
    with pytest.raises(ValueError, match="batch_size"):
        Trainer(two, "sgd", {"lr": 0.1}).step(batch_size)


def test_misspelt_names_get_suggestions(two):
    with pytest.raises(ValueError, match="did you mean 'adam'"):
        Trainer(two, "adamm")
    with pytest.raises(TypeError, match=r"momentun.*did you mean 'momentum'"):
        Trainer(two, "sgd", {"lr": 0.1, "momentun": 0.9})


def test_parameters_of_different_devices_are_refused(two):
    other = replicate(nn.Linear(1, 1), cpu(5)).collect_params()
    with pytest.raises(ValueError, match=r"same devices.*\[cpu\(0\), cpu\(1\)\].*'weight' on \[cpu\(5\)\]"):
        Trainer([*two.collect_params().values(), *other.values()], "sgd")


def test_equal_names_are_refused(two):
    with pytest.raises(ValueError, match="same name"):
        Trainer([*two.collect_params().values()] * 2, "sgd")


@pytest.mark.parametrize("params", [mlp(), [], {}, [torch.zeros(1)], None])
def test_other_things_than_parameters_are_refused(params):
    with pytest.raises(TypeError, match="replicate"):
        Trainer(params, "sgd")


def test_optimizer_of_other_parameters_is_refused(two):
    with pytest.raises(ValueError, match=r"does not hold parameter '0.weight'"):
        Trainer(two, torch.optim.SGD(mlp().parameters(), lr=0.1))


def test_replicas_must_not_drift_apart(two):
    with pytest.raises(ValueError, match="drift apart"):
        Trainer(two, "sgd", kvstore=None)


def test_update_by_hand_is_refused_when_the_store_updates(two):
    trainer = Trainer(two, "sgd", {"lr": 0.1})
    for call in (trainer.allreduce_grads, lambda: trainer.update(1)):
        with pytest.raises(ValueError, match="update_on_kvstore=False"):
            call()


def test_states_of_another_optimizer_are_refused(two, tmp_path):
    trainer = Trainer(two, "sgd", {"lr": 0.1}, update_on_kvstore=False)
    trainer.save_states(tmp_path / "states")
    with pytest.raises(ValueError, match="holds states of 'sgd'"):
        Trainer(two, "adam", update_on_kvstore=False).load_states(tmp_path / "states")
    (tmp_path / "states").write_bytes(b"nonsense")
    with pytest.raises(PacelineError, match="damaged"):
        trainer.load_states(tmp_path / "states")


@pytest.mark.parametrize("kind", ["local", "dist"])
def test_states_of_another_model_are_refused_and_change_nothing(kind, tmp_path):
    def trainer_of(width, **options):
        store = LocalStore() if kind == "local" else OneProcess("a").stores()[0]
        net = replicate(nn.Linear(width, 1), [cpu()])
        trainer = Trainer(net, "adam", {"lr": 0.1}, store, update_on_kvstore=True, **options)
        backward([net(torch.ones(2, width)).sum()])
        trainer.step(2)
        return trainer

    def residuals():
        states = trainer.kvstore.codec_states()
        return {(key, name): one.tolist() for key, state in states.items() for name, one in state.items()}

    trainer_of(3).save_states(tmp_path / "states")
    trainer = trainer_of(2, compression_params={"type": "2bit", "threshold": 8})
    before = residuals()
    with pytest.raises((ValueError, KeyMismatchError)):
        trainer.load_states(tmp_path / "states")
    assert before
    assert residuals() == before


def test_one_device_needs_no_store():
    trainer = Trainer(replicate(nn.Linear(1, 1), cpu()), "sgd")
    assert trainer.kvstore is None
    assert not trainer.update_on_kvstore


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 1, reason="needs a CUDA device")
@pytest.mark.parametrize("store", STORES)
def test_gpu_and_cpu_together_equal_one_device(store):
    torch.manual_seed(1)
    reference, batches = mlp(), dense_batches()
    net = replicate(copy.deepcopy(reference), [gpu(0), cpu(0)])
    trainer = Trainer(net, "sgd", {"lr": 0.1, "momentum": 0.9}, **store_options(store))
    train_replicated(net, trainer, batches, [3, 1])
    train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), batches)
    for name, param in reference.named_parameters():
        for value in net.collect_params()[name].list_data():
            assert torch.allclose(value.cpu(), param, atol=1e-3)


MXNETS = {
    "nag": (NAG, {"lr": 0.05}),
    "ftrl": (Ftrl, {"lr": 0.2, "lamda1": 0.001}),
    "signum": (Signum, {"lr": 0.01}),
    "signsgd": (SignSGD, {"lr": 0.01}),
    "dcasgd": (DCASGD, {"lr": 0.1, "momentum": 0.5}),
    "sgld": (SGLD, {"lr": 0.001, "seed": 3}),
    "sgd": (MXNetSGD, {"lr": 0.1, "momentum": 0.9}),
}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", MXNETS)
def test_mxnets_optimizers_and_its_clip_train_as_one_process_does(name, store):
    torch.manual_seed(1)
    cls, options = MXNETS[name]
    reference, batches = mlp(), dense_batches()[:10]
    net = replicate(copy.deepcopy(reference), [cpu(0), cpu(1)])
    params = {"clip_gradient": 0.05, "rescale_grad": 0.5, "lr_scheduler": lambda step: options["lr"] / step, **options}
    form = {"momentum_form": "mxnet"} if name == "sgd" else {}
    trainer = Trainer(net, name, params | form, **store_options(store))
    optimizer = cls([{"params": [one], "key": key} for key, one in reference.named_parameters()], **options)
    for step, batch in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = options["lr"] / step
        optimizer.zero_grad()
        (reference(batch[0]) - batch[1]).square().mean().backward()
        for param in reference.parameters():
            param.grad = (0.5 * param.grad).clamp(-0.05, 0.05)
        optimizer.step()
        train_replicated(net, trainer, [batch])
    assert_equal_weights(net, reference)


@pytest.mark.parametrize("store", STORES)
def test_clip_counts_with_an_optimizer_instance_too(store):
    net = replicate(nn.Linear(1, 1, bias=False), [cpu(0), cpu(1)])
    before = net.collect_params()["weight"].data().item()
    instance = torch.optim.SGD(net.replicas[0].parameters(), lr=1.0)
    trainer = Trainer(net, instance, {"clip_gradient": 0.25}, **store_options(store))
    for _ in range(2):
        backward([out.sum() for out in net([torch.ones(1, 1), torch.ones(1, 1)])])
        trainer.step(1)
    assert net.collect_params()["weight"].data().item() == pytest.approx(before - 0.5)


@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize("frozen_at", [0, 2])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_layer_that_is_frozen_for_some_steps_equals_torch(name, frozen_at, on_store):
    torch.manual_seed(1)
    reference, batches = mlp(), dense_batches()[:8]
    net = replicate(copy.deepcopy(reference), [cpu(0), cpu(1)])
    cls = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    optimizer, mine, weight = (
        cls(reference.parameters(), lr=0.05),
        net.collect_params()["0.weight"],
        reference[0].weight,
    )
    trainer = None
    for step, batch in enumerate(batches):
        if step in (frozen_at, frozen_at + 3):
            mine.grad_req, weight.requires_grad = ("null", False) if step == frozen_at else ("write", True)
        trainer = trainer or Trainer(net, name, {"lr": 0.05}, update_on_kvstore=on_store)
        train_replicated(net, trainer, [batch])
        train_plainly(reference, optimizer, [batch])
    assert_equal_weights(net, reference)


def test_frozen_layer_that_becomes_unlike_on_its_devices_is_refused():
    net, batches = replicate(mlp(), [cpu(0), cpu(1)]), dense_batches()[:2]
    weight = net.collect_params()["0.weight"]
    weight.grad_req = "null"
    trainer = Trainer(net, "sgd", {"lr": 0.05}, update_on_kvstore=False)
    train_replicated(net, trainer, batches[:1])
    weight.list_data()[1].fill_(3.0)
    weight.grad_req = "write"
    with pytest.raises(PacelineError, match="differs between its devices"):
        train_replicated(net, trainer, batches[1:])
