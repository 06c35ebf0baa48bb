"""Metrics: MXNet's names and classes, beside which a ``Module`` takes metrics of torchmetrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from paceline.layout.tensors import as_tensor
from paceline.naming import absent, suggestion

if TYPE_CHECKING:
    from torchmetrics import Metric

#: A name, a metric of this file or of torchmetrics, or several of them.
MetricLike: TypeAlias = "str | EvalMetric | CompositeEvalMetric | Metric | Sequence[str | EvalMetric | Metric]"
_Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


class EvalMetric:
    """A mean over samples: the sum of a score and the number of samples.

    Args:
        name: name in logs; by default the class's own.
    """

    _NAME = ""

    def __init__(self, name: str = "") -> None:
        self.name = name or self._NAME
        self.reset()

    def reset(self) -> None:
        """Remove all batches."""
        self._sum, self._count = torch.zeros((), dtype=torch.float64, device="cpu"), 0

    def update(self, labels: _Tensors, preds: _Tensors) -> None:
        """Add a batch: labels and predictions of one device, or lists of them."""
        for label, pred in zip(_listed(labels), _listed(preds), strict=True):
            self.add(*self._score(as_tensor(label).to(pred.device), pred.detach()))

    def add(self, total: torch.Tensor, count: int) -> None:
        """Add the sum of the scores of ``count`` samples."""
        self._sum, self._count = self._sum.to(total.device) + total.detach().double(), self._count + count

    def get(self) -> tuple[str, float]:
        """Return name and value; the value is NaN without any batch."""
        return self.name, self._value(float(self._sum) / self._count) if self._count else math.nan

    def get_name_value(self) -> list[tuple[str, float]]:
        """Return a list of name and value."""
        return [self.get()]

    def _score(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor, int]:
        raise NotImplementedError

    def _value(self, mean: float) -> float:
        return mean


class Accuracy(EvalMetric):
    """Part of the samples whose class is right.

    Predictions are scores [N, classes, ...], classes (int), or one number per sample (float) for two classes, [N] or
    [N, 1]: a probability, or a logit if one is below 0 or above 1.
    """

    _NAME = "accuracy"

    def _score(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor, int]:
        if pred.dim() > label.dim() and pred.shape[1] > 1:
            pred = pred.argmax(1)
        elif pred.is_floating_point():
            pred = pred > (0.5 if bool(((pred >= 0) & (pred <= 1)).all()) else 0.0)
        return (pred.reshape(label.shape) == label).sum(), label.numel()


class TopKAccuracy(EvalMetric):
    """Part of the samples whose class is among the ``top_k`` best; scores are [N, classes]."""

    def __init__(self, top_k: int = 1, name: str = "top_k_accuracy") -> None:
        super().__init__(f"{name}_{top_k}")
        self._top_k = top_k

    def _score(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor, int]:
        best = pred.topk(min(self._top_k, pred.shape[1]), 1).indices
        return (best == label.reshape(-1, 1)).sum(), label.numel()


class MSE(EvalMetric):
    """Mean squared error."""

    _NAME = "mse"

    def _score(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (pred - label.reshape(pred.shape)).square().sum(), pred.numel()


class RMSE(MSE):
    """Root of the mean squared error of all samples."""

    _NAME = "rmse"

    def _value(self, mean: float) -> float:
        return math.sqrt(mean)


class MAE(EvalMetric):
    """Mean absolute error."""

    _NAME = "mae"

    def _score(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (pred - label.reshape(pred.shape)).abs().sum(), pred.numel()


class Loss(EvalMetric):
    """Mean of losses per sample, which are given as predictions; in a ``Module`` the mean of its loss."""

    _NAME = "loss"

    def update(self, labels: Any, preds: _Tensors) -> None:
        """Add the losses of a batch; labels are not looked at."""
        for pred in _listed(preds):
            self.add(pred.sum(), pred.numel())


class CompositeEvalMetric:
    """Several metrics that are updated together.

    Args:
        metrics: a name (``acc`` or ``accuracy``, ``top_k_accuracy``, ``mse``, ``rmse``, ``mae``, ``loss``), a metric of
            this file or of torchmetrics, or a list of them.

    Raises:
        ValueError: unknown name.
        TypeError: neither a name nor a metric.
    """

    def __init__(self, metrics: MetricLike = ()) -> None:
        self.metrics: list[Any] = []
        for one in metrics if isinstance(metrics, list | tuple) else [metrics]:
            self.add(one)

    def add(self, metric: MetricLike) -> None:
        """Add a metric, or the metrics of another set."""
        made = create(metric)
        if isinstance(made, CompositeEvalMetric):
            self.metrics += made.metrics
        elif isinstance(made, EvalMetric) or all(hasattr(made, one) for one in ("update", "compute", "reset")):
            self.metrics.append(made)
        else:
            raise TypeError(f"{metric!r} is not a metric: give a name ({', '.join(_KINDS)}) or a torchmetrics metric")

    def reset(self) -> None:
        """Remove all batches."""
        for one in self.metrics:
            one.reset()

    def update(self, labels: _Tensors, preds: _Tensors, mean_loss: torch.Tensor | None = None) -> None:
        """Add a batch to all metrics.

        Args:
            labels: the expected outputs of one device, or of several.
            preds: the model's outputs, likewise.
            mean_loss: mean loss of the batch, if it is known, for the metric ``loss``.
        """
        for one in self.metrics:
            if isinstance(one, Loss) and mean_loss is not None:
                one.add(mean_loss * len(labels), len(labels))
            elif isinstance(one, EvalMetric):
                one.update(labels, preds)
            else:
                for label, pred in zip(_listed(labels), _listed(preds), strict=True):
                    one.to(pred.device).update(pred.detach(), label)

    def get(self) -> tuple[list[str], list[float]]:
        """Return names and values; a metric without any batch is NaN."""
        found = self.get_name_value()
        return [name for name, _ in found], [value for _, value in found]

    def get_name_value(self) -> list[tuple[str, float]]:
        """Return pairs of name and value."""
        return [one.get() if isinstance(one, EvalMetric) else (type(one).__name__, _value(one)) for one in self.metrics]


_KINDS: dict[str, Callable[..., EvalMetric]] = {
    "accuracy": Accuracy, "acc": Accuracy, "top_k_accuracy": TopKAccuracy, "top_k_acc": TopKAccuracy,
    "mse": MSE, "rmse": RMSE, "mae": MAE, "loss": Loss,
}  # fmt: skip


def create(metric: MetricLike, **options: Any) -> Any:
    """Return the metric of a name, the set of a list of metrics, or a metric itself.

    Raises:
        ValueError: unknown name.
        TypeError: a list has something else than metrics.
    """
    if isinstance(metric, list | tuple):
        return CompositeEvalMetric(metric)
    if not isinstance(metric, str):
        return metric
    if metric.lower() not in _KINDS:
        raise ValueError(
            f"unknown metric {metric!r}{suggestion(metric.lower(), _KINDS)} Any torchmetrics metric works too"
        )
    return _KINDS[metric.lower()](**options)


def _value(metric: Any) -> float:
    return float(metric.compute()) if metric.update_count else math.nan


def _listed(values: _Tensors) -> Sequence[torch.Tensor]:
    return [values] if isinstance(values, torch.Tensor) else values


if not TYPE_CHECKING:  # a checker knows the names above, and no others
    _INSTEAD = {
        "CrossEntropy": "the metric 'loss'",
        "Perplexity": "math.exp of the metric 'loss'",
        **dict.fromkeys(("F1", "MCC", "PearsonCorrelation", "NegativeLogLikelihood"), "torchmetrics'"),
        **dict.fromkeys(("CustomMetric", "np"), "a subclass of EvalMetric, or a metric of torchmetrics"),
    }
    __getattr__ = absent(__name__, [one for one in globals() if one[0].isupper()], _INSTEAD)
