"""Options of local steps: the period, the outer optimizer, fragments, and late answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from paceline.hetero.local_period import Period, Quadratic
from paceline.updaters import DelayedNesterov

Outer: TypeAlias = Mapping[str, Any] | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

#: Published for DiLoCo, also with Delayed Nesterov; with one worker less momentum (MuLoCo, arXiv 2505.23725).
_OUTER_LR, _OUTER_MOMENTUM, _OUTER_MOMENTUM_ALONE = 0.7, 0.9, 0.5

#: Published for ResNets: alpha = 0.2, largest learning rate 0.8, H0 = 2.
_QSR_SHARE_OF_SGD = 1 / 32


@dataclass(frozen=True)
class LocalChoices:
    """Options of local steps.

    Attributes:
        period: how long a worker steps by itself.
        outer: options of SGD for the servers, or a function that makes an optimizer of a list of parameters; None:
            Nesterov's momentum, with a learning rate of 0.7 and a momentum of 0.9 (of 0.5 where a worker is alone),
            delayed where each push is an update.
        fragments: parts of the model that are pushed one after the other within a period.
        delay: steps for which an answer is not waited for.
        blend: share of a worker's own weights when a late answer comes: 0 takes the answer, 1 ignores it. None: the
            answer, and all that the worker has done since its push.
        schedule: how the period grows; None: it does not.
    """

    period: Period
    outer: Outer | None = None
    fragments: int = 1
    delay: int = 0
    blend: float | None = None
    schedule: Quadratic | None = None

    @classmethod
    def of(
        cls, inner: torch.optim.Optimizer, local_steps: int | str | None, schedule: str | None = None, **options: Any
    ) -> LocalChoices | None:
        """Return the options of a DistributedOptimizer that wraps ``inner``; None: it takes no local steps.

        Raises:
            ValueError: an option is out of range, or there are some without ``local_steps``.
        """
        if local_steps is not None:
            share = _QSR_SHARE_OF_SGD if isinstance(inner, torch.optim.SGD) else 1.0
            grows = None if schedule is None else Quadratic.parse(schedule, share)
            return cls(Period.parse(local_steps), schedule=grows, **options)
        if schedule is not None or any(value != getattr(cls, name) for name, value in options.items()):
            raise ValueError(f"{', '.join(options)} and schedule belong to local_steps=; give that too")
        return None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: an option is out of range; the text names it.
        """
        if self.fragments < 1 or self.delay < 0 or not (self.blend is None or 0 <= self.blend <= 1):
            raise ValueError(
                f"fragments={self.fragments} must be at least 1, delay={self.delay} at least 0, and "
                f"blend={self.blend} from 0 to 1"
            )
        if self.schedule is not None and (self.period.is_auto or not self.period.steps):
            raise ValueError("schedule is for a number of steps; local_steps is another rule already")
        steps = 0 if self.period.by_speed else self.period.steps  # of a worker by speed, or of a time, nothing is known
        if steps and (self.fragments > steps or self.delay >= steps):
            raise ValueError(
                f"fragments={self.fragments} and delay={self.delay} do not fit a period of {steps} steps: give "
                "local_steps= of at least as many steps as fragments, and of more than the delay"
            )

    def optimizer(self, params: list[torch.nn.Parameter], workers: int, merge: str) -> torch.optim.Optimizer:
        """Make the outer optimizer of some parameters."""
        if callable(self.outer):
            return self.outer(params)
        if self.outer is not None:
            return torch.optim.SGD(params, **self.outer)
        if merge == "each" and workers > 1:
            return DelayedNesterov(params, _OUTER_LR, _OUTER_MOMENTUM, every=workers)
        momentum = _OUTER_MOMENTUM if workers > 1 else _OUTER_MOMENTUM_ALONE
        return torch.optim.SGD(params, lr=_OUTER_LR, momentum=momentum, nesterov=True)

    def described(self) -> dict[str, str]:
        """Return the options as texts, which must be the same on all workers."""
        options = None if self.outer is None or callable(self.outer) else sorted(self.outer.items())
        outer = "a function" if callable(self.outer) else str(options)
        return {
            "local_steps": str(self.period), "outer": outer, "fragments": str(self.fragments), "delay": str(self.delay),
            "blend": str(self.blend), "schedule": str(self.schedule),
        }  # fmt: skip
