"""A user's script with every public call, for ``mypy --strict``. It is not run."""

from __future__ import annotations

from typing import Any, assert_type

import torch

import paceline
from paceline.lightning import PacelineStrategy


def stores(kind: str, options: dict[str, Any]) -> paceline.kvstore.KVStore:
    assert_type(paceline.kvstore.create(), paceline.kvstore.KVStore)
    assert_type(paceline.kvstore.create("device"), paceline.kvstore.KVStore)
    assert_type(paceline.kvstore.create("dist_sync", mean=True), paceline.kvstore.KVStore)
    paceline.kvstore.create("dist_async", age=3, weighting="inverse", lr_scale="sample")
    paceline.kvstore.create("dist_ssync", staleness=3, age=2)
    paceline.kvstore.create("dist_gsync", groups=[[0, 1], ["fast:0"]], staleness=1)
    paceline.kvstore.create("dist_ksync_device", k=2, age=0, namespace="mine")
    paceline.kvstore.create("dist_auto")
    reduced = paceline.kvstore.create("horovod")
    reduced.pushpull("w", torch.ones(2))
    reduced.barrier()
    assert_type(reduced.local_rank, int)
    store = paceline.kvstore.create("local") if kind == "alone" else paceline.kvstore.create("dist_sync")
    if kind in paceline.kvstore.store_types():
        store = paceline.kvstore.create(kind, **options)
    return store


def key_values(store: paceline.kvstore.KVStore) -> None:
    value, out = torch.ones(2), torch.empty(2)
    store.init("w", value)
    store.init([1, 2], [value, value])
    store.broadcast("b", value, out=out)
    store.push("w", [value, value], priority=-1)
    store.pull("w", out=out, ignore_sparse=False)
    store.pushpull([1, 2], [value, value])
    store.row_sparse_pull("w", out=out, row_ids=torch.tensor([0]))
    store.samples = 32
    store.barrier()
    assert_type((store.rank, store.num_workers, store.type), tuple[int, int, str])
    assert_type(store.num_dead_nodes(), int)
    assert_type(store.leaving, bool)
    assert_type(store.stats(), dict[str, Any])
    assert_type(store.send_command_to_servers("head", "body"), list[str])
    assert_type(store.is_capable(store.OPTIMIZER), bool)
    assert_type(store.learning_rate, float)
    store.save_optimizer_states("states", dump_optimizer=True)
    store.load_optimizer_states("states")
    store.set_optimizer_states(store.optimizer_states())
    if store.keeps_residuals:
        store.set_codec_states(store.codec_states())
    store.for_optimizer(mean=True, clip_norm=1.0).close()


def updates(store: paceline.kvstore.KVStore, options: dict[str, Any], own: type[torch.optim.Optimizer]) -> None:
    store.set_optimizer("sgd", lr=0.1, momentum=0.9, nesterov=True, clip_gradient=1.0, rescale_grad=1 / 32)
    store.set_optimizer("sgd", learning_rate=0.1, wd=1e-4, momentum_form="mxnet", lr_scheduler=lambda n: 0.1 / n)
    store.set_optimizer("adam", lr=1, betas=(0.9, 0.99), keys={"w": paceline.updaters.KeyOptions(lr_mult=2.0)})
    store.set_optimizer("adam", **options)
    store.set_optimizer(torch.optim.SGD([torch.ones(2)], lr=0.1), multi_precision=True)
    store.set_optimizer(own, anything=3)
    store.set_optimizer(paceline.updaters.NAG, lr=0.1)
    store.set_updater("add", rate=0.5)
    store.set_updater(lambda key, merged, stored: None)
    store.set_options([{**group, "lr": 0.05} for group in store.options()])
    store.set_learning_rate(0.1)
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    assert paceline.compression.known_codecs()


@paceline.register("command", "greet")
def greet(context: Any, body: str) -> str:
    return body


class Mine(paceline.kvstore.KVStoreBase):
    """A store of the user's own."""


paceline.kvstore.KVStoreBase.register(Mine)
assert "mine" in paceline.kvstore.KVStoreBase.registry


def samplers(store: paceline.kvstore.KVStore) -> None:
    data = paceline.data.digits(train=True, num_parts=2, part_index=1).shard(2, 0)
    paceline.data.ArrayDataset(torch.ones(4), torch.ones(4))
    sampler = paceline.data.ShardedSampler(data, num_parts=store.num_workers, part_index=store.rank)
    sampler.set_epoch(1)
    sampler.load_state_dict(sampler.state_dict())
    assert_type(paceline.data.batches(data, sampler, 32, drop_last=True), paceline.data.Batches)
    shared = paceline.data.SharedBatchSampler(data, store, global_batch_size=64, shares="measured")
    pooled = paceline.data.PooledBatchSampler(data, store, batch_size=32)
    for one in (shared, pooled, paceline.data.batch_sampler(data, store, batch_size=32)):
        torch.utils.data.DataLoader(data, batch_sampler=one)
    paceline.data.read_spans("spans", num_workers=2)
    with paceline.data.RecordWriter("train.rec") as file:
        file.write(b"record", key=7)
    assert_type(paceline.data.Records("train.rec", index="train.idx")[0], bytes)
    shards = paceline.data.shards(["train.tar"], store, shares="pool")
    assert_type(shards, paceline.data.Shards)
    torch.utils.data.DataLoader(shards, batch_size=None)


def loop(net: torch.nn.Module, store: paceline.kvstore.KVStore) -> None:
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    optimizer = paceline.DistributedOptimizer(
        inner,
        kvstore=store,
        model=net,
        update="worker",
        compression=[{"type": "2bit", "threshold": 0.002}, {"type": "int8", "leg": "pull"}],
        clip_grad_norm=1.0,
        on_nan="skip",
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    with optimizer.no_sync():
        net(torch.ones(2)).sum().backward()
    optimizer.samples = 32
    optimizer.count(torch.ones(32, 2))
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    optimizer.exchange_now()
    for act in (optimizer.synchronize, optimizer.broadcast_weights, optimizer.refresh_weights, optimizer.sync_buffers):
        act()
    assert_type((optimizer.round, optimizer.skipped_steps), tuple[int, int])
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups = [{**group, "lr": 0.1} for group in optimizer.param_groups]
    optimizer.state = optimizer.state
    paceline.save("job.ckpt", net, optimizer, step=1, extra={"epoch": 1})
    paceline.report(loss=0.5, step=1, samples=32)
    paceline.notice("the machine is needed")
    step, extra = paceline.load("job.ckpt", net, optimizer)
    assert_type(step, int)
    print(extra["epoch"])
    optimizer.close()
    store.close()


def mxnet(net: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    assert_type(paceline.mx.cpu(1), paceline.Context)
    contexts: list[paceline.Context] = [paceline.cpu(), *(paceline.gpu(i) for i in range(paceline.num_gpus()))]
    replicas = paceline.gluon.replicate(net, contexts)
    trainer = paceline.gluon.Trainer(replicas, "sgd", {"learning_rate": 0.1}, kvstore="device")
    losses = [net(part).sum() for part in paceline.gluon.split_and_load(images, contexts)]
    paceline.gluon.backward(losses)
    trainer.step(batch_size=32)
    trainer.save_states("states")
    trainer.load_states("states")
    module = paceline.Module(net, context=contexts)
    module.fit(zip(images, labels, strict=True), num_epoch=2, kvstore="local", optimizer_params={"lr": 0.1})
    assert_type(module.score(zip(images, labels, strict=True)), list[tuple[str, float]])


def horovod(net: torch.nn.Module) -> None:
    paceline.hvd.init()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * paceline.hvd.size())
    optimizer = paceline.hvd.DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), compression=paceline.hvd.Compression.fp16
    )
    paceline.hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    paceline.hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    total = paceline.hvd.allreduce(torch.ones(2), name="total", op=paceline.hvd.Sum)
    assert_type(total, torch.Tensor)
    assert_type(paceline.hvd.rank(), int)
    paceline.hvd.synchronize(paceline.hvd.allgather_async(total))
    paceline.hvd.shutdown()


def errors() -> type[Exception]:
    assert paceline.__version__
    strategy = PacelineStrategy("dist_sync")
    assert isinstance(strategy, paceline.lightning.PacelineStrategy)
    print(paceline.optim.LARS)
    return paceline.errors.PeerDiedError
