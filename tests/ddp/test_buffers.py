"""Buffers of unlike shape: the error of a DDP model names the buffer and the way out, which then trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ProtocolError
from paceline.testing import LocalJob
from tests.ddp.test_backend import open_group


class Masked(torch.nn.Module):
    """Keeps a buffer as long as its batch."""

    def __init__(self, length: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("mask", torch.ones(length))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mask = torch.ones(len(inputs))
        return self.layer(inputs)


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ProtocolError) as caught:
        call()
    return str(caught.value)


def unlike_buffers() -> list[str]:
    rank = open_group()
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    found = [error_of(lambda: DistributedDataParallel(Masked(1 + rank), process_group=groups[0]))]
    model = DistributedDataParallel(Masked(), process_group=groups[1])
    model(torch.ones(2 + rank, 2)).sum().backward()
    found.append(error_of(lambda: model(torch.ones(2, 2))))
    own = DistributedDataParallel(Masked(1 + rank), process_group=groups[2], broadcast_buffers=False)
    for _ in range(2):
        own(torch.ones(2 + rank, 2)).sum().backward()
    dist.barrier()
    assert len(own.module.mask) == 2 + rank
    return found


@pytest.mark.parametrize("shared_memory", [True, False])
def test_error_names_the_buffer_of_unlike_shape_and_the_way_out(shared_memory: bool) -> None:
    with LocalJob(num_workers=2, num_servers=1, shared_memory=shared_memory) as job:
        at_start, in_training = zip(*job.run(unlike_buffers), strict=True)
    for texts, lengths in ((at_start, (1, 2)), (in_training, (2, 3))):
        for rank, text in enumerate(texts):
            assert text.startswith(
                f"buffer 'mask' differs between ranks: rank {rank} has shape ({lengths[rank]},) of torch.float32, "
                f"rank {1 - rank} has shape ({lengths[1 - rank]},)"
            )
            assert "broadcast_buffers=False" in text
