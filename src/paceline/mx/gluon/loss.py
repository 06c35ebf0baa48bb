"""Gluon's losses: one value per sample, the mean over the sample's other elements. ``backward`` sums the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from paceline.naming import absent

__all__ = [
    "HuberLoss",
    "L1Loss",
    "L2Loss",
    "SigmoidBCELoss",
    "SigmoidBinaryCrossEntropyLoss",
    "SoftmaxCELoss",
    "SoftmaxCrossEntropyLoss",
]


class _PerSample(nn.Module):
    """A loss of elements, times a weight; the mean over all axes but the first."""

    def __init__(self, weight: float | None = 1.0) -> None:
        super().__init__()
        self.weight = 1.0 if weight is None else weight

    def forward(
        self, pred: torch.Tensor, label: torch.Tensor, sample_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss of every sample, [N]; ``sample_weight`` has a factor for each of them or each element."""
        elements = self._elements(pred, label) * self.weight
        if sample_weight is not None:
            is_per_sample = sample_weight.numel() == len(elements)
            shape = (-1, *[1] * (elements.dim() - 1)) if is_per_sample else elements.shape
            elements = elements * sample_weight.reshape(shape)
        return elements.flatten(1).mean(1) if elements.dim() > 1 else elements

    def _elements(self, pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class SoftmaxCrossEntropyLoss(_PerSample):
    """Cross-entropy of softmax.

    Args:
        axis: the axis of the classes.
        sparse_label: labels are numbers of classes (of any dtype); otherwise they are probabilities.
        from_logits: predictions are logarithms of probabilities.
        weight: factor on the loss.
    """

    def __init__(
        self, axis: int = -1, sparse_label: bool = True, from_logits: bool = False, weight: float | None = None
    ) -> None:
        super().__init__(weight)
        self._axis, self._sparse, self._from_logits = axis, sparse_label, from_logits

    def _elements(self, pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logs = pred if self._from_logits else F.log_softmax(pred, self._axis)
        if not self._sparse:
            return -(logs * label).sum(self._axis)
        index = label.long().reshape(logs.select(self._axis, 0).shape).unsqueeze(self._axis)
        return -logs.gather(self._axis, index).squeeze(self._axis)


class L2Loss(_PerSample):
    """Half of the squared difference, as Gluon has it."""

    def _elements(self, pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (pred - label.reshape(pred.shape)).square() / 2


class L1Loss(_PerSample):
    """Absolute difference."""

    def _elements(self, pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (pred - label.reshape(pred.shape)).abs()


class HuberLoss(_PerSample):
    """Absolute difference minus ``rho / 2``, and below ``rho`` its square over ``2 * rho``."""

    def __init__(self, rho: float = 1.0, weight: float | None = None) -> None:
        super().__init__(weight)
        self._rho = rho

    def _elements(self, pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.huber_loss(pred, label.reshape(pred.shape), reduction="none", delta=self._rho) / self._rho


class SigmoidBinaryCrossEntropyLoss(_PerSample):
    """Binary cross-entropy of the sigmoid; with ``from_sigmoid`` predictions are probabilities."""

    def __init__(self, from_sigmoid: bool = False, weight: float | None = None) -> None:
        super().__init__(weight)
        self._loss = F.binary_cross_entropy if from_sigmoid else F.binary_cross_entropy_with_logits

    def _elements(self, pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self._loss(pred, label.reshape(pred.shape).to(pred.dtype), reduction="none")


SoftmaxCELoss = SoftmaxCrossEntropyLoss
SigmoidBCELoss = SigmoidBinaryCrossEntropyLoss

if not TYPE_CHECKING:  # a checker knows the names above, and no others
    _INSTEAD = {
        "CTCLoss": "torch.nn.CTCLoss(reduction='none')",
        "KLDivLoss": "torch.nn.KLDivLoss(reduction='none')",
        "HingeLoss": "torch.relu(1 - pred * label)",
        "TripletLoss": "torch.nn.TripletMarginLoss(reduction='none')",
        "CosineEmbeddingLoss": "torch.nn.CosineEmbeddingLoss(reduction='none')",
        "Loss": "torch.nn.Module",
    }
    __getattr__ = absent(__name__, __all__, _INSTEAD)
