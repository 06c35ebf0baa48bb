"""Options of local steps: the period, the outer optimizer, fragments, and late answers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Outer: TypeAlias = Mapping[str, Any] | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

#: Published for DiLoCo; with one worker less momentum (MuLoCo, arXiv 2505.23725).
_OUTER_LR, _OUTER_MOMENTUM, _OUTER_MOMENTUM_ALONE = 0.7, 0.9, 0.5

#: Measured times vary by so much: machines that are alike take as many steps.
_NOISE = 0.03

#: Steps of a period by speed, of the fastest worker.
_BY_SPEED = 100


@dataclass(frozen=True)
class Period:
    """How long a worker steps by itself. Pure.

    Attributes:
        steps: steps of a worker, or of the fastest one where ``by_speed``; 0: the period is a time.
        seconds: the time.
        by_speed: slower workers take fewer steps: as many as fit the time of the fastest worker's.
    """

    steps: int = 0
    seconds: float = 0.0
    by_speed: bool = False

    @property
    def follows_speed(self) -> bool:
        """Whether slower workers take fewer steps."""
        return self.by_speed or not self.steps

    @classmethod
    def parse(cls, local_steps: int | str) -> Period:
        """Return the period of the argument ``local_steps``.

        Raises:
            ValueError: it is none of the forms that the text lists.
        """
        if isinstance(local_steps, int) and not isinstance(local_steps, bool) and local_steps >= 1:
            return cls(steps=local_steps)
        words = local_steps.split() if isinstance(local_steps, str) else []
        if words[-2:] == ["by", "speed"] and len(words) <= 3 and (len(words) == 2 or words[0].isdigit()):
            steps = int(words[0]) if len(words) == 3 else _BY_SPEED
            if steps >= 1:
                return cls(steps=steps, by_speed=True)
        if len(words) == 2 and words[1] == "s":
            try:
                seconds = float(words[0])
            except ValueError:
                seconds = 0.0
            if 0 < seconds < math.inf:
                return cls(seconds=seconds)
        raise ValueError(
            f"local_steps={local_steps!r}: give a number of steps (32), a time ('30 s'), 'by speed', or '32 by speed'"
        )

    def steps_of(self, step_s: float, fastest_s: float) -> int:
        """Return the steps of a worker whose step takes so long; where times are not known, those of the fastest."""
        if not self.by_speed or not (step_s > 0 and fastest_s > 0):
            return self.steps
        return min(self.steps, max(1, math.floor((1 + _NOISE) * self.steps * fastest_s / step_s)))


@dataclass(frozen=True)
class LocalChoices:
    """Options of local steps.

    Attributes:
        period: how long a worker steps by itself.
        outer: options of SGD for the servers, or a function that makes an optimizer of a list of parameters; None:
            Nesterov's momentum, with a learning rate of 0.7 and a momentum of 0.9 (of 0.5 where a worker is alone).
        fragments: parts of the model that are pushed one after the other within a period.
        delay: steps for which an answer is not waited for.
        blend: share of a worker's own weights when a late answer comes: 0 takes the answer, 1 ignores it.
    """

    period: Period
    outer: Outer | None = None
    fragments: int = 1
    delay: int = 0
    blend: float = 0.0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: an option is out of range; the text names it.
        """
        if self.fragments < 1 or self.delay < 0 or not 0 <= self.blend <= 1:
            raise ValueError(
                f"fragments={self.fragments} must be at least 1, delay={self.delay} at least 0, and "
                f"blend={self.blend} from 0 to 1"
            )
        steps = 0 if self.period.by_speed else self.period.steps  # of a worker by speed, or of a time, nothing is known
        if steps and (self.fragments > steps or self.delay >= steps):
            raise ValueError(
                f"fragments={self.fragments} and delay={self.delay} do not fit a period of {steps} steps: give "
                "local_steps= of at least as many steps as fragments, and of more than the delay"
            )

    def optimizer(self, params: list[torch.nn.Parameter], workers: int) -> torch.optim.Optimizer:
        """Make the outer optimizer of some parameters."""
        if callable(self.outer):
            return self.outer(params)
        momentum = _OUTER_MOMENTUM if workers > 1 else _OUTER_MOMENTUM_ALONE
        options = {"lr": _OUTER_LR, "momentum": momentum, "nesterov": True} if self.outer is None else dict(self.outer)
        return torch.optim.SGD(params, **options)

    def described(self) -> dict[str, str]:
        """Return the options as texts, which must be the same on all workers."""
        options = None if self.outer is None or callable(self.outer) else sorted(self.outer.items())
        outer = "a function" if callable(self.outer) else str(options)
        return {
            "local_steps": str(self.period), "outer": outer, "fragments": str(self.fragments), "delay": str(self.delay),
            "blend": str(self.blend),
        }  # fmt: skip
