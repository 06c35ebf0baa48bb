"""Batch normalisation over the whole batch of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.mx.gluon.parallel import ReplicaCall, current_call, join_graphs


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose statistics are those of the whole batch, over all replicas of one process.

    The replicas exchange their means and variances in the forward pass, and gradients flow through the exchange. So the
    result is that of one device, except for rounding. Plain ``BatchNorm`` layers use the statistics of their own slice,
    as in every data-parallel system.

    The graphs of the replicas share the statistics: call ``gluon.backward(losses)`` (or ``backward`` of the sum of the
    losses), not ``loss.backward()`` one by one. Input: ``(N, C)`` or ``(N, C, *)``.
    """

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        """Replace every ``BatchNorm`` layer inside ``module`` and return it (or the layer that replaces it)."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls | nn.SyncBatchNorm):
            return cls._from(module)
        for name, child in module.named_children():
            setattr(module, name, cls.convert(child))
        return module

    @classmethod
    def _from(cls, layer: _BatchNorm) -> SyncBatchNorm:
        new = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        new.weight, new.bias = layer.weight, layer.bias
        new.running_mean, new.running_var = layer.running_mean, layer.running_var
        new.num_batches_tracked, new.training = layer.num_batches_tracked, layer.training
        return new

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise one slice."""
        call = current_call()
        if call is None or not self._uses_batch_statistics():
            return super().forward(input)
        self._check_input_dim(input)
        mean, var, count = self._whole_batch(input, call)
        self._track(mean.detach(), var.detach(), count)
        shape = (1, -1) + (1,) * (input.dim() - 2)
        scale = torch.rsqrt(var + self.eps) * (1.0 if self.weight is None else self.weight)
        shift = -mean * scale + (0.0 if self.bias is None else self.bias)
        return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def _uses_batch_statistics(self) -> bool:
        return self.training or self.running_mean is None

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm({self.num_features}) got a slice of shape {tuple(input.shape)}")

    def _whole_batch(self, input: torch.Tensor, call: ReplicaCall) -> tuple[torch.Tensor, torch.Tensor, int]:
        dims = [dim for dim in range(input.dim()) if dim != 1]
        var, mean = torch.var_mean(input.float() if input.dtype.itemsize < 4 else input, dims, correction=0)
        count = input.numel() // max(1, input.shape[1])
        if torch.is_grad_enabled():
            join_graphs()
        gathered = call.meeting.gather(call.index, f"{type(self).__name__}({self.num_features})", (count, mean, var))
        return _combine([_to(mean.device, one) for one in gathered])

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, var: torch.Tensor, count: int) -> None:
        if not (self.training and self.track_running_stats) or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_((var * (count / max(1, count - 1))).to(self.running_var.dtype), factor)


def _to(device: torch.device, one: tuple[int, torch.Tensor, torch.Tensor]) -> tuple[int, torch.Tensor, torch.Tensor]:
    return one[0], one[1].to(device), one[2].to(device)


def _combine(parts: Sequence[tuple[int, Any, Any]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Combine count, mean and variance of disjoint samples without large sums (Chan, Golub, LeVeque 1979)."""
    total = sum(count for count, _, _ in parts)
    mean = sum(mean * (count / total) for count, mean, _ in parts)
    var = sum((var + (one - mean).square()) * (count / total) for count, one, var in parts)
    return mean, var, total
