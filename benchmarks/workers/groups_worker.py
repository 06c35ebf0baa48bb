"""All-reduce, and steps of DDP, by the backend paceline and by Gloo, which take turns in the same processes."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from examples.models import NETWORKS
from paceline.ddp import backend
from paceline.worker.current import current_session

#: Bytes of a tensor, and steps of each contender.
REDUCED = {
    "102 MB": (102_228_128, 8), "10 MB": (10_000_000, 20), "1.6 MB": (1_600_000, 60), "40 KB": (40_000, 200),
    "400 bytes": (400, 200),
}  # fmt: skip
#: By network: shape of a sample, batch of each process, steps of each contender.
TRAINED = {"lenet": ((1, 28, 28), 64, 40), "resnet18": ((3, 32, 32), 4, 12)}


def measured(contenders: dict[str, Callable[[], None]], steps: int) -> dict[str, float]:
    """Return the median milliseconds of each contender; after each step the next one has its turn."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(steps + 3):
        for name, step in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(found[3:]) for name, found in times.items()}


def trainer(name: str, shape: tuple[int, ...], batch: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Return a function that makes a training step with a group."""
    torch.manual_seed(0)
    net = DistributedDataParallel(NETWORKS[name](), process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    images, labels = torch.randn(batch, *shape), torch.randint(10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(net(images), labels).backward()
        optimizer.step()

    return step


def main() -> None:
    chosen = sys.argv[2:]
    backend.register()
    session = current_session()
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=session.rank,
                            world_size=len(session.workers))  # fmt: skip
    groups = {"paceline": dist.new_group(backend="paceline"), "gloo": dist.group.WORLD}
    rows = {}
    for title, (size, steps) in REDUCED.items():
        if not chosen or title in chosen:
            tensor = torch.zeros(size // 4)
            rows[title] = measured(
                {one: partial(dist.all_reduce, tensor, group=group) for one, group in groups.items()}, steps
            )
    for name, (shape, batch, steps) in TRAINED.items():
        if not chosen or name in chosen:
            rows[name] = measured({one: trainer(name, shape, batch, group) for one, group in groups.items()}, steps)
    if session.rank == 0:
        print(json.dumps(rows), flush=True)


main()
