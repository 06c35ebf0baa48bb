"""Metrics for ``Module``: names, or metrics of torchmetrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from paceline.errors import MissingExtraError
from paceline.naming import absent, suggestion

if TYPE_CHECKING:
    from torchmetrics import Metric

#: A name, a torchmetrics metric, or several of them.
MetricLike: TypeAlias = "str | Metric | Sequence[str | Metric]"

#: Classes of MXNet's that are names here, or classes of torchmetrics.
_ELSEWHERE = ("Accuracy", "F1", "Loss", "MAE", "MSE", "Perplexity", "RMSE", "TopKAccuracy", "create")
_NAMES = ("accuracy", "acc", "mse", "mae", "loss")


class MetricSet:
    """Metrics that are updated together.

    Args:
        metrics: a name (``acc`` or ``accuracy``, ``mse``, ``mae``, ``loss``), a metric of torchmetrics, or a list of
            them.

    Raises:
        ValueError: unknown name.
        TypeError: neither a name nor a metric.
        MissingExtraError: torchmetrics is not installed.
    """

    def __init__(self, metrics: MetricLike) -> None:
        listed = [metrics] if isinstance(metrics, str) or not isinstance(metrics, Sequence) else list(metrics)
        self._metrics: dict[str, Any] = {}
        for one in listed:
            name = _name(one)
            self._metrics[name] = None if isinstance(one, str) else one
        # Import now and not at the first batch: it takes seconds, and the package may be missing.
        self._torchmetrics = _import() if None in self._metrics.values() else None

    def update(self, output: torch.Tensor, label: torch.Tensor, mean_loss: torch.Tensor | None = None) -> None:
        """Add one batch.

        Args:
            output: the model's output for the batch.
            label: the expected output.
            mean_loss: mean loss of the batch, for the metric ``loss``.
        """
        for name in self._metrics:
            if self._metrics[name] is None:
                self._metrics[name] = _build(self._torchmetrics, name, output)
            metric = self._metrics[name].to(output.device)
            if name == "loss":
                if mean_loss is not None:
                    metric.update(mean_loss.detach().to(output.device), len(label))
            else:
                metric.update(output.detach(), label)

    def get(self) -> list[tuple[str, float]]:
        """Return names and values; a metric without any batch is NaN."""
        return [(name, _value(one)) for name, one in self._metrics.items()]

    def reset(self) -> None:
        """Remove all batches."""
        for one in self._metrics.values():
            if one is not None:
                one.reset()


def _name(metric: Any) -> str:
    if not isinstance(metric, str):
        if not (hasattr(metric, "update") and hasattr(metric, "compute") and hasattr(metric, "reset")):
            raise TypeError(f"{metric!r} is not a metric: give a name ({', '.join(_NAMES)}) or a torchmetrics metric")
        return type(metric).__name__
    lower = metric.lower()
    if lower not in _NAMES:
        hint = suggestion(lower, _NAMES)
        raise ValueError(f"unknown metric {metric!r}{hint} Any torchmetrics metric works too")
    return "accuracy" if lower == "acc" else lower


def _import() -> Any:
    try:
        import torchmetrics
    except ImportError:
        raise MissingExtraError("metrics need torchmetrics: pip install 'paceline[module]'") from None
    return torchmetrics


def _build(torchmetrics: Any, name: str, output: torch.Tensor) -> Any:
    if name == "accuracy":
        binary = output.dim() == 1
        return (
            torchmetrics.Accuracy("binary")
            if binary
            else torchmetrics.Accuracy("multiclass", num_classes=output.shape[1], average="micro")
        )
    kinds = {
        "mse": torchmetrics.MeanSquaredError,
        "mae": torchmetrics.MeanAbsoluteError,
        "loss": torchmetrics.MeanMetric,
    }
    return kinds[name]()


def _value(metric: Any) -> float:
    return float(metric.compute()) if metric is not None and metric.update_count else float("nan")


if not TYPE_CHECKING:  # a checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        known = ("MetricSet", "MetricLike")
        raise absent("paceline.mx.metric", name, known, dict.fromkeys(_ELSEWHERE, "its name, or torchmetrics'"))
