"""One rank of the test of the DDP hook: trains the same model in several ways."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.compression import DDPState, ddp_hook

STEPS = 60
WAYS: dict[str, Any] = {
    "ddp": None,
    "uncompressed": {"type": "none"},
    "lossless": {"type": "topk", "ratio": 1.0},
    "2bit": {"type": "2bit", "threshold": 0.1},
    "int8": {"type": "int8"},
    "topk": {"type": "topk", "ratio": 0.1},
    "randomk": {"type": "randomk", "ratio": 0.2},
    "powersgd": {"type": "powersgd", "rank": 2},
}


def data_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(rank))
    return inputs, torch.tanh(inputs[:, :1] - inputs[:, 1:2])


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 48), torch.nn.Tanh(), torch.nn.Linear(48, 48), torch.nn.Tanh(), torch.nn.Linear(48, 1)
    )


def train(rank: int, state: DDPState | None) -> dict[str, Any]:
    replica = DistributedDataParallel(model(), bucket_cap_mb=0.004)
    if state is not None:
        replica.register_comm_hook(state, ddp_hook)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.5)
    inputs, targets = data_of(rank)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(replica(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([parameter.detach().flatten() for parameter in replica.parameters()])
    sent = state.sent_bytes if state is not None else None
    return {"losses": losses, "weights": weights.tolist(), "sent_bytes": sent}


def train_in_every_way(folder: str) -> dict[str, Any]:
    """Return what came out of each way, on this rank."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {way: train(rank, None if way == "ddp" else DDPState(params)) for way, params in WAYS.items()}
    dist.destroy_process_group()
    return results
