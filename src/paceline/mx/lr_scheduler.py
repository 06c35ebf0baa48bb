"""MXNet's schedules: functions of the number of the update, for the option ``lr_scheduler`` of an optimizer.

``base_lr`` is set to the optimizer's learning rate, if it was given one. The rate is a function of the number alone, so
a run that resumes at update n has the rate of update n.
"""

from __future__ import annotations

import abc
import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Any

__all__ = ["CosineScheduler", "FactorScheduler", "LRScheduler", "MultiFactorScheduler", "PolyScheduler"]


class LRScheduler(abc.ABC):
    """A schedule with a warm-up.

    Args:
        base_lr: rate after the warm-up, before any change.
        warmup_steps: updates of the warm-up.
        warmup_begin_lr: rate of its beginning.
        warmup_mode: ``linear``, or ``constant``: the rate of its beginning until it ends.

    Raises:
        ValueError: a rate above ``base_lr`` at the beginning, or another mode.
    """

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        if warmup_mode not in ("linear", "constant"):
            raise ValueError(f"warmup_mode {warmup_mode!r} is unknown; it is 'linear' or 'constant'")
        if warmup_steps < 0 or warmup_begin_lr > base_lr:
            raise ValueError(f"a warm-up of {warmup_steps} steps from {warmup_begin_lr} to {base_lr} does not rise")
        self.base_lr, self.warmup_steps = base_lr, warmup_steps
        self.warmup_begin_lr, self.warmup_mode = warmup_begin_lr, warmup_mode

    def __call__(self, num_update: int) -> float:
        """Return the rate of update ``num_update``, counted from 1."""
        if num_update >= self.warmup_steps:
            return self._rate(num_update)
        rise = num_update / self.warmup_steps if self.warmup_mode == "linear" else 0.0
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * rise

    @abc.abstractmethod
    def _rate(self, num_update: int) -> float:
        """Return the rate after the warm-up."""


class FactorScheduler(LRScheduler):
    """Multiplies the rate by ``factor`` after every ``step`` updates, down to ``stop_factor_lr``."""

    def __init__(self, step: int, factor: float = 1.0, stop_factor_lr: float = 1e-8, **warm_up: Any) -> None:
        super().__init__(**warm_up)
        _check_steps([step], factor)
        self.step, self.factor, self.stop_factor_lr = step, factor, stop_factor_lr

    def _rate(self, num_update: int) -> float:
        return max(self.stop_factor_lr, self.base_lr * self.factor ** (max(num_update - 1, 0) // self.step))


class MultiFactorScheduler(LRScheduler):
    """Multiplies the rate by ``factor`` after each of the updates ``step``, which rise."""

    def __init__(self, step: Sequence[int], factor: float = 1.0, **warm_up: Any) -> None:
        super().__init__(**warm_up)
        _check_steps(step, factor)
        self.step, self.factor = list(step), factor

    def _rate(self, num_update: int) -> float:
        return self.base_lr * self.factor ** bisect.bisect_left(self.step, num_update)


class _Decay(LRScheduler):
    """A decay from ``base_lr`` to ``final_lr`` between the warm-up and ``max_update``."""

    def __init__(self, max_update: int, final_lr: float, **warm_up: Any) -> None:
        super().__init__(**warm_up)
        if max_update <= self.warmup_steps:
            raise ValueError(f"max_update is {max_update}; the warm-up alone has {self.warmup_steps} updates")
        self.max_update, self.final_lr = max_update, final_lr

    def _rate(self, num_update: int) -> float:
        passed = (min(num_update, self.max_update) - self.warmup_steps) / (self.max_update - self.warmup_steps)
        return self.final_lr + (self.base_lr - self.final_lr) * self._remains(passed)

    @abc.abstractmethod
    def _remains(self, passed: float) -> float:
        """Return the part of the decay that remains, 1 to 0, when a part of its updates has passed."""


class PolyScheduler(_Decay):
    """A polynomial decay to ``final_lr`` at ``max_update``."""

    def __init__(
        self, max_update: int, base_lr: float = 0.01, pwr: float = 2, final_lr: float = 0.0, **warm_up: Any
    ) -> None:
        super().__init__(max_update, final_lr, base_lr=base_lr, **warm_up)
        self.power = pwr

    def _remains(self, passed: float) -> float:
        return float((1.0 - passed) ** self.power)


class CosineScheduler(_Decay):
    """A half cosine down to ``final_lr`` at ``max_update`` (Loshchilov and Hutter 2017)."""

    def __init__(self, max_update: int, base_lr: float = 0.01, final_lr: float = 0.0, **warm_up: Any) -> None:
        super().__init__(max_update, final_lr, base_lr=base_lr, **warm_up)

    def _remains(self, passed: float) -> float:
        return (1.0 + math.cos(math.pi * passed)) / 2


def _check_steps(steps: Sequence[int], factor: float) -> None:
    if factor > 1.0:
        raise ValueError(f"factor is {factor}; above 1 the rate would grow")
    if not steps or steps[0] < 1 or any(b <= a for a, b in itertools.pairwise(steps)):
        raise ValueError(f"step is {list(steps)}; steps are 1 or more, and each is above the one before")
