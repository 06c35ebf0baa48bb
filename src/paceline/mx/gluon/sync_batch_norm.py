"""Batch normalisation over the whole batch of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.collectives.batch_norm import JoinedBatchNorm, Moments
from paceline.mx.gluon.parallel import current_call, join_graphs


class SyncBatchNorm(JoinedBatchNorm):
    """Batch normalisation whose statistics are computed from the whole batch, over all replicas of one process.

    The replicas exchange their means and variances in the forward pass, and gradients flow through the exchange. So the
    result equals one device's, except for rounding. Plain ``BatchNorm`` layers use the statistics of their own slice,
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

    def joined_moments(self, input: torch.Tensor) -> Moments | None:
        """Return the statistics of all replicas' slices; None outside of a call of several replicas."""
        call = current_call()
        if call is None:
            return None
        dims = [dim for dim in range(input.dim()) if dim != 1]
        var, mean = torch.var_mean(input.float() if input.dtype.itemsize < 4 else input, dims, correction=0)
        count = input.numel() // max(1, input.shape[1])
        if torch.is_grad_enabled():
            join_graphs()
        gathered = call.meeting.gather(call.index, f"SyncBatchNorm({self.num_features})", (count, mean, var))
        return _combine([(number, one.to(mean.device), other.to(mean.device)) for number, one, other in gathered])


def _combine(parts: Sequence[tuple[int, Any, Any]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Combine count, mean and variance of disjoint samples without large sums (Chan, Golub, LeVeque 1979)."""
    total = sum(count for count, _, _ in parts)
    mean = sum(mean * (count / total) for count, mean, _ in parts)
    var = sum((var + (one - mean).square()) * (count / total) for count, one, var in parts)
    return mean, var, total
