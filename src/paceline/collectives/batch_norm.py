"""Batch normalisation over a batch of which each replica or process has a part."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

#: Mean and variance of each channel, and the number of values that they are of.
Moments = tuple[torch.Tensor, torch.Tensor, "int | torch.Tensor"]


class JoinedBatchNorm(_BatchNorm):
    """Normalises its part with the statistics of the whole batch, which a subclass finds. Parts may be unlike.

    Input: ``(N, C)`` or ``(N, C, *)``. In ``eval``, and where no other has a part, it is ``torch.nn.BatchNorm2d``.
    """

    def joined_moments(self, input: torch.Tensor) -> Moments | None:
        """Return the statistics of the whole batch, with their gradients; None: ``input`` is the whole batch."""
        raise NotImplementedError

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a part."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        moments = self.joined_moments(input) if uses_batch else None
        if moments is None:
            return super().forward(input)
        mean, variance, count = moments
        self._track(mean.detach(), variance.detach(), float(count))
        shape = (1, -1) + (1,) * (input.dim() - 2)
        scale = torch.rsqrt(variance + self.eps) * (1.0 if self.weight is None else self.weight)
        out = (input - mean.view(shape)) * scale.view(shape)
        return (out if self.bias is None else out + self.bias.view(shape)).to(input.dtype)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm({self.num_features}) got a slice of shape {tuple(input.shape)}")

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        if not (self.training and self.track_running_stats) or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_((variance * (count / max(1.0, count - 1))).to(self.running_var.dtype), factor)
