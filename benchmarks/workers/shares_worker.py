"""Worker of the benchmark of shares: its computation is a sleep, so that many machines fit on a few cores."""

import json
import sys
import time
from pathlib import Path

import torch

import paceline
from paceline.config import from_environment


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    store = paceline.kvstore.create(task["store_type"])
    inputs, outputs = task["shape"]
    model = torch.nn.Linear(inputs, outputs)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
    sampler = sampler_of(task, store)
    x, steps = torch.randn(4096, inputs), []
    for slower in task["slower"]:
        seconds = task["seconds"][store.rank] * slower[store.rank]
        epoch = []
        for indices in sampler:
            begun = time.monotonic()
            count = len(indices)
            optimizer.zero_grad()
            loss = model(x[:count]).square().mean()
            nap_s = seconds * (task["fixed"] + (1 - task["fixed"]) * count / task["batch"])
            time.sleep(max(0.0, begun + nap_s - time.monotonic()))
            loss.backward()
            optimizer.step()
            epoch.append((begun, time.monotonic(), count, nap_s))
        steps.append(epoch)
    if from_environment().profile:
        return
    Path(task["folder"], f"{store.rank}.json").write_text(json.dumps({"epochs": steps}))


def sampler_of(task, store):
    """Return the batches of a mode."""
    if task["shares"] == "chosen":
        return paceline.data.batch_sampler(task["length"], store, batch_size=task["batch"])
    total = task["batch"] * store.num_workers
    return paceline.data.SharedBatchSampler(task["length"], store, global_batch_size=total, shares=task["shares"])


main()
