"""Calls that ``mypy --strict`` must refuse: every line with ``# wrong``, and no other."""

from __future__ import annotations

import torch

import paceline

store = paceline.kvstore.create("dist_sync", stalenes=3)  # wrong
store = paceline.kvstore.create("dist_sync", staleness=3)  # wrong
store = paceline.kvstore.create("dist_ssync", staleness="3")  # wrong
store = paceline.kvstore.create("dist_async", lr_scale="batch")  # wrong
store = paceline.kvstore.create("local", mean=True)  # wrong
reduced = paceline.kvstore.create("allreduce", namespace="a")  # wrong
reduced = paceline.kvstore.create("allreduce")
reduced.push("w", torch.ones(1))  # wrong
store = paceline.kvstore.create("dist_sync")
store.set_optimizer("sgd", lrr=0.1)  # wrong
store.set_optimizer("sgd", lr="0.1")  # wrong
store.set_optimizer(torch.optim.SGD([torch.ones(1)]), lrr=0.1)  # wrong
store.set_updater("add", rat=0.5)  # wrong
store.set_updater(lambda key: None)  # wrong
store.pul("w", torch.ones(1))  # wrong
print(store.stats().updates)  # wrong
net = torch.nn.Linear(1, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(net.parameters()), kvstor=store)  # wrong
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(net.parameters()), update="sever")  # wrong
paceline.data.ShardedSampler(4, num_part=2)  # wrong
paceline.save("job.ckpt", net, optimizer)  # wrong
paceline.kvstor.create("local")  # wrong
paceline.hvd.allreduc(torch.ones(1))  # wrong
