"""Options of DistributedOptimizer, checked. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Update = Literal["worker", "server"]
OnNan = Literal["error", "skip", "pass"]


@dataclass(frozen=True)
class MergeChoices:
    """Options of how gradients are merged and applied."""

    reduction: Literal["mean", "sum"] = "mean"
    passes: int = 1
    """Backward passes per push."""
    overlap: bool | None = None
    """Push while backward runs; None: the default of the store's mode."""
    lazy: bool = False
    """``step`` does not wait for new weights."""
    clip_norm: float | None = None
    clip_value: float | None = None
    on_nan: OnNan = "error"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: an option is wrong; the text names it and its allowed values.
        """
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is 'mean' or 'sum', not {self.reduction!r}")
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step is {self.passes}; it must be at least 1")
        if self.on_nan not in get_args(OnNan):
            raise ValueError(f"on_nan is 'error', 'skip' or 'pass', not {self.on_nan!r}")
        for name, limit in (("clip_grad_norm", self.clip_norm), ("clip_grad_value", self.clip_value)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} is {limit}; it must be more than 0")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("clip_grad_norm and clip_grad_value exclude each other; give one of them")
