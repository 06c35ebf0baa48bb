"""SyncBatchNorm equals BatchNorm on the joined batch."""

from __future__ import annotations

import torch
from torch import nn

import paceline.hvd as hvd
from tests.hvd.ranks import run


def joined() -> list[bool]:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    ours, plain = hvd.SyncBatchNorm(3, momentum=0.3).double(), nn.BatchNorm2d(3, momentum=0.3).double()
    for one in (ours, plain):
        one.weight.data.copy_(torch.tensor([0.5, 1.5, -1.0]))
    batches = [torch.randn(2 + one, 3, 4, 2, dtype=torch.float64) * 3 + 100 for one in range(size)]
    weights = [torch.randn_like(batch) for batch in batches]
    found = []
    for _ in range(2):
        x = batches[rank].clone().requires_grad_()
        every = torch.cat(batches).requires_grad_()
        out, wanted = ours(x), plain(every)
        ours.zero_grad()
        plain.zero_grad()
        (out * weights[rank]).sum().backward()
        (wanted * torch.cat(weights)).sum().backward()
        start = sum(len(batch) for batch in batches[:rank])
        mine = slice(start, start + len(x))
        found.append(torch.allclose(out, wanted[mine]))
        found.append(torch.allclose(x.grad, every.grad[mine]))
        for param, other in zip(ours.parameters(), plain.parameters(), strict=True):
            found.append(torch.allclose(hvd.allreduce(param.grad, op=hvd.Sum), other.grad))
        found.append(torch.allclose(ours.running_mean, plain.running_mean))
        found.append(torch.allclose(ours.running_var, plain.running_var))
    ours.eval()
    plain.eval()
    found.append(torch.allclose(ours(batches[0]), plain(batches[0])))
    return found


def test_unlike_batches_equal_one_joined_batch() -> None:
    for found in run(joined, 3):
        assert all(found), found
