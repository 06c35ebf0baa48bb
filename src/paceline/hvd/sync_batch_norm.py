"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import Function
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.hvd import world
from paceline.hvd.collectives import allreduce_async, synchronize
from paceline.hvd.starting import Sum


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = synchronize(allreduce_async(tensor, None, None, Sum))
    return result


class SyncBatchNorm(_BatchNorm):
    """Normalises with mean and variance over all ranks, which may have unlike batches. On any device.

    Args are those of ``torch.nn.BatchNorm2d``. In ``eval``, and with one rank, it is that.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a batch of shape (samples, channels, ...)."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or not world.is_initialized() or world.current().size == 1:
            return super().forward(input)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            assert self.num_batches_tracked is not None
            momentum = 1.0 / float(self.num_batches_tracked)
        apply: Any = _Normalise.apply
        out, mean, variance, count = apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            with torch.no_grad():
                unbiased = variance * count / max(float(count) - 1.0, 1.0)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        result: torch.Tensor = out
        return result


def _over_channels(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over all dimensions but the channels'."""
    return tensor.sum(dim=[one for one in range(tensor.dim()) if one != 1])


class _Normalise(Function):
    """Two reductions forward, sums and squares, and one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float) -> Any:
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        count = wide.new_tensor([wide.numel() / wide.shape[1]])
        # Deviations from the mean of all ranks are squared, not the values: large values would cancel.
        totals = _sum(torch.cat([_over_channels(wide), count]))
        total = totals[-1]
        mean = totals[:-1] / total
        shape = [1, -1, *[1] * (x.dim() - 2)]
        centred = wide - mean.view(shape)
        variance = _sum(_over_channels(centred * centred)) / total
        scale = (variance + eps).rsqrt()
        normal = centred * scale.view(shape)
        ctx.save_for_backward(normal, scale, weight, total)
        ctx.has_bias = bias is not None
        out = normal if weight is None else normal * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, total)
        return out.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        normal, scale, weight, total = ctx.saved_tensors
        shape = [1, -1, *[1] * (normal.dim() - 2)]
        grad = grads[0].to(normal.dtype)
        bias_grad, weight_grad = _over_channels(grad), _over_channels(grad * normal)
        channels = bias_grad.numel()
        sums = _sum(torch.cat([bias_grad, weight_grad])) / total
        spread = grad - sums[:channels].view(shape) - normal * sums[channels:].view(shape)
        factor = scale if weight is None else scale * weight
        x_grad = (spread * factor.view(shape)).to(grads[0].dtype)
        return x_grad, None if weight is None else weight_grad, bias_grad if ctx.has_bias else None, None
