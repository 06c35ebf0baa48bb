"""Updaters without state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.ranges import Ranges
from paceline.updaters.flat import FlatUpdater
from paceline.updaters.spec import StepOptions


class AssignUpdater(FlatUpdater):
    """Replace the stored value by the merged one: a store without an optimizer."""

    def update(self, merged: torch.Tensor, scale: float, options: StepOptions | None, absent: Ranges = ()) -> None:
        """Set the value to ``scale * merged``: 0 where nobody had a gradient."""
        if scale == 1.0:
            self.value.copy_(merged)
        else:
            torch.mul(merged, scale, out=self.value)

    def update_nothing(self) -> None:
        """Set the value to 0."""
        self.value.zero_()

    def skip(self) -> None:
        """Set the value to NaN: all who read it see that there is no gradient to step with."""
        self.value.fill_(float("nan"))

    def split(self, at: int) -> tuple[FlatUpdater, FlatUpdater]:
        """Return updaters of both halves."""
        left, right = self.cut(at)
        return AssignUpdater(self.value[:at], left), AssignUpdater(self.value[at:], right)


class AddUpdater(FlatUpdater):
    """Add ``rate`` times the merged value: MXNet's ``test`` optimizer.

    Args:
        value: 1-D tensor, updated in place.
        pieces: what lies where in it.
        rate: the factor, also accepted as ``rescale_grad``.
    """

    def __init__(self, value: torch.Tensor, pieces: Sequence[object], rate: float = 1.0) -> None:
        super().__init__(value, pieces)  # type: ignore[arg-type]
        self._rate = rate

    def update(self, merged: torch.Tensor, scale: float, options: StepOptions | None, absent: Ranges = ()) -> None:
        """Add ``rate * scale * merged`` to the value."""
        self.value.add_(merged, alpha=self._rate * scale)

    def split(self, at: int) -> tuple[FlatUpdater, FlatUpdater]:
        """Return updaters of both halves."""
        left, right = self.cut(at)
        return AddUpdater(self.value[:at], left, self._rate), AddUpdater(self.value[at:], right, self._rate)
