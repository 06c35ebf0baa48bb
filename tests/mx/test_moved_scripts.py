"""Scripts of MXNet's examples in paceline's form: two workers reach what one process with the joined batch reaches."""

from __future__ import annotations

import logging

import pytest
import torch

from paceline import mx
from paceline.mx import autograd, gluon
from paceline.testing import LocalJob

WORKERS, BATCH, SAMPLES = 2, 4, 16
ORDER = torch.arange(SAMPLES).view(WORKERS, -1, BATCH).transpose(0, 1).flatten()


def images():
    """Return images and labels; in one process in the order in which two workers see them together."""
    chance = torch.Generator().manual_seed(0)
    return torch.rand(SAMPLES, 1, 6, 6, generator=chance), torch.arange(SAMPLES) % 3


def numbers(state):
    return [one.double().sum().item() for one in state.values()]


# ---- example/distributed_training/cifar10_dist.py -----------------------------------------------------------------


class SplitSampler(gluon.data.sampler.Sampler):
    def __init__(self, length, num_parts=1, part_index=0):
        self.part_len = length // num_parts
        self.start = self.part_len * part_index
        self.end = self.start + self.part_len

    def __iter__(self):
        return iter(range(self.start, self.end))

    def __len__(self):
        return self.part_len


def cifar10_dist(kind, batch_size, joined):
    torch.manual_seed(7)  # mx.random.seed
    store = mx.kv.create(kind)
    ctx = [mx.cpu(0), mx.cpu(1)]
    data, label = images()
    if joined:
        data, label = data[ORDER], label[ORDER]
    train_data = gluon.data.DataLoader(
        gluon.data.ArrayDataset(data, label), batch_size, sampler=SplitSampler(SAMPLES, store.num_workers, store.rank)
    )
    net = gluon.nn.Sequential()
    with net.name_scope():
        net.add(gluon.nn.Conv2D(channels=4, kernel_size=3, activation="relu"))
        net.add(gluon.nn.MaxPool2D(pool_size=(2, 2), strides=(2, 2)))
        net.add(gluon.nn.Dense(8, activation="relu"), gluon.nn.Dense(3))
    net = gluon.replicate(net, ctx)  # new
    net.collect_params().initialize(mx.init.Xavier(), ctx=ctx)
    softmax_cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=store)
    for _ in range(2):
        for batch in train_data:
            data = gluon.utils.split_and_load(batch[0], ctx_list=ctx, batch_axis=0)
            label = gluon.utils.split_and_load(batch[1], ctx_list=ctx, batch_axis=0)
            with autograd.record():
                losses = [softmax_cross_entropy(net(x), y) for x, y in zip(data, label, strict=True)]
            autograd.backward(losses)  # one pass for all devices
            trainer.step(BATCH)
    acc = mx.gluon.metric.Accuracy()
    for data, label in train_data:
        acc.update(preds=torch.argmax(net(gluon.as_in_context(data, ctx[0])), axis=1), labels=label)
    assert 0 <= acc.get()[1] <= 1
    return numbers(net.state_dict())


# ---- example/image-classification/common/fit.py -------------------------------------------------------------------


def module_fit(kind, batch_size, joined):
    torch.manual_seed(7)
    kv = mx.kvstore.create(kind)
    data, label = images()
    if joined:
        data, label = data[ORDER], label[ORDER]
    train = mx.io.NDArrayIter(data, label, batch_size, num_parts=kv.num_workers, part_index=kv.rank)
    net = gluon.nn.Sequential(gluon.nn.Dense(8, activation="relu"), gluon.nn.Dense(3))  # in place of a symbol
    model = mx.mod.Module(net, context=[mx.cpu(0), mx.cpu(1)])
    metrics = ["accuracy", mx.metric.create("top_k_accuracy", top_k=2)]
    history = model.fit(
        train,
        eval_data=train,
        eval_metric=metrics,
        kvstore=kv,
        optimizer="sgd",
        optimizer_params={
            "learning_rate": 0.1,
            "momentum": 0.9,
            "wd": 1e-3,
            "lr_scheduler": mx.lr_scheduler.MultiFactorScheduler(step=[1, 3], factor=0.5),
        },
        initializer=mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
        batch_end_callback=[mx.callback.Speedometer(batch_size, 1), lambda param: param.eval_metric.get_name_value()],
        epoch_end_callback=None,  # of _save_model, without a prefix
        num_epoch=2,
    )
    assert model.trainer.learning_rate == 0.025
    assert list(history[-1].evaluation) == ["accuracy", "top_k_accuracy_2"]
    return numbers(model.net.state_dict())


# ---- tests/nightly/dist_sync_kvstore.py ---------------------------------------------------------------------------


def raw_store(kind, _, joined):
    kv = mx.kv.create(kind)
    kv.set_optimizer("sgd", learning_rate=1.0, rescale_grad=-2.0)
    kv.init([3, 5], [torch.ones(2, 3), torch.ones(40, 50)])
    for repeat in range(3):
        for key, shape in ((3, (2, 3)), (5, (40, 50))):
            ranks = range(WORKERS) if joined else [kv.rank]
            kv.push(key, [torch.full(shape, rank + 1.0) for rank in ranks])
            kv.pull(key, out=(val := torch.zeros(shape)))
            assert torch.equal(val, torch.full(shape, (WORKERS + 1) * WORKERS * (repeat + 1) + 1.0))
    return [val.sum().item()]


SCRIPTS = {"cifar10_dist": cifar10_dist, "module_fit": module_fit, "raw_store": raw_store}


def in_workers():
    torch.use_deterministic_algorithms(True)
    logging.disable()
    return {name: run("dist_sync", BATCH, False) for name, run in SCRIPTS.items()}


@pytest.fixture(scope="module")
def found():
    with LocalJob(num_workers=WORKERS, num_servers=1) as job:
        return job.run(in_workers)


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_workers_reach_what_the_joined_batch_reaches(found, name):
    alone = SCRIPTS[name]("local", BATCH * WORKERS, True)
    for worker in found:
        assert worker[name] == pytest.approx(alone, rel=1e-5, abs=1e-5)
