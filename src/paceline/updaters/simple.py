"""The updater of a store without an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.layout.ranges import Ranges
from paceline.updaters import gradient
from paceline.updaters.flat import FlatUpdater, Piece
from paceline.updaters.runs import completed, group_of, runs_of
from paceline.updaters.spec import StepOptions, UpdaterSpec


class AssignUpdater(FlatUpdater):
    """Replaces the stored value by the merged one."""

    def __init__(self, value: torch.Tensor, pieces: Sequence[Piece], spec: UpdaterSpec) -> None:
        super().__init__(value, pieces)
        self._spec = spec
        self._use(StepOptions())

    def _use(self, options: StepOptions) -> None:
        self._options = options
        self._groups = completed(options.groups, self._spec.groups)
        self._prepares = any(gradient.GRADIENT_OPTIONS & group.keys() for group in self._groups)

    def update(self, merged: torch.Tensor, scale: float, options: StepOptions | None, absent: Ranges = ()) -> None:
        """Set the value to ``scale * merged``, clipped if there is a limit; to 0 where no worker had a gradient."""
        if options is not None and options is not self._options:
            self._use(options)
        if not self._prepares:
            if scale == 1.0:
                self.value.copy_(merged)
            else:
                torch.mul(merged, scale, out=self.value)
            return
        keys = self._spec.keys if self._options.keys is None else self._options.keys
        for run in runs_of(self.pieces, keys):
            [part] = gradient.prepared(
                [run.view(merged)], group_of(run.options, self._groups), scale, ours=scale != 1.0
            )
            run.view(self.value).copy_(part)

    def update_nothing(self) -> None:
        """Set the value to 0."""
        self.value.zero_()

    def skip(self) -> None:
        """Set the value to NaN: it shows all readers that there is no gradient for a step."""
        self.value.fill_(float("nan"))

    def split(self, at: int) -> tuple[FlatUpdater, FlatUpdater]:
        """Return updaters of both halves."""
        left, right = self.cut(at)
        return self._like(self.value[:at], left), self._like(self.value[at:], right)

    def join(self, right: FlatUpdater, value: torch.Tensor, pieces: Sequence[Piece]) -> FlatUpdater | None:
        """Return one updater for both values, if the two have the same options."""
        if not isinstance(right, AssignUpdater) or (right._spec, right._options) != (self._spec, self._options):
            return None
        return self._like(value, pieces)

    def _like(self, value: torch.Tensor, pieces: Sequence[Piece]) -> AssignUpdater:
        other = AssignUpdater(value, pieces, self._spec)
        other._use(self._options)
        return other
