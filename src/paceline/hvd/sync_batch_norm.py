"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import Function

from paceline.collectives import world
from paceline.collectives.batch_norm import JoinedBatchNorm, Moments
from paceline.collectives.operations import Sum, allreduce, synchronize


class RankBatchNorm(JoinedBatchNorm):
    """``hvd.SyncBatchNorm``: normalises with mean and variance over all ranks, on any device.

    Args are those of ``torch.nn.BatchNorm2d``.
    """

    def joined_moments(self, input: torch.Tensor) -> Moments | None:
        """Return the statistics of all ranks' batches; None if this rank is alone."""
        if not world.is_initialized() or world.current().size == 1:
            return None
        apply: Any = _Moments.apply
        found: Moments = apply(input)
        return found


SyncBatchNorm = RankBatchNorm


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = synchronize(allreduce([tensor], None, None, Sum))
    return result


def _over_channels(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over all dimensions but the channels'."""
    return tensor.sum(dim=[one for one in range(tensor.dim()) if one != 1])


class _Moments(Function):
    """Two reductions forward, sums and squares, and one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Moments:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = wide.new_tensor([wide.numel() / wide.shape[1]])
        # Deviations from the mean of all ranks are squared, not the values: large values would cancel.
        totals = _sum(torch.cat([_over_channels(wide), count]))
        total = totals[-1]
        mean = totals[:-1] / total
        variance = _sum(_over_channels((wide - _shaped(mean, x)).square())) / total
        ctx.save_for_backward(x, mean, total)
        ctx.mark_non_differentiable(total)
        return mean, variance, total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x, mean, total = ctx.saved_tensors
        of_mean, of_variance = (_sum(torch.cat(grads[:2])) / total).chunk(2)
        spread = 2 * (x - _shaped(mean, x)) * _shaped(of_variance, x)
        grad: torch.Tensor = (_shaped(of_mean, x) + spread).to(x.dtype)
        return grad


def _shaped(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return channels.view(1, -1, *[1] * (x.dim() - 2))
