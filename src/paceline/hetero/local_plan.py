"""The shortest period and the weakest codec with which machines compute nearly all of the time. Pure.

In a period of H steps a worker computes H times a step, encodes and copies for a while, and waits for the answer to its
push, which may be late by some steps (``delay``). Longer periods and stronger codecs cost loss. So the codec is the
weakest one that needs at most :data:`SHORT` steps; where none does, the strongest one with as many as it takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.hetero.local_period import MOST_STEPS

#: Bytes of an element as codecs send it.
ELEMENT_BYTES = {
    "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 17 / 32, "2bit": 1 / 4, "1bit": 1 / 8, "chunktopk": 84 / 4096,
}  # fmt: skip

#: Codecs of deltas, the weakest first; empty: none.
CODECS = ("", "int8", "int4", "chunktopk")

#: Share of the time in which machines should compute.
COMPUTING = 0.95

#: Steps of a period that cost little loss with any codec.
SHORT = 32

#: Part of a period for which the answer of its exchange may be late.
_LATE = 0.25


@dataclass(frozen=True)
class ExchangeCost:
    """The time of one exchange with a codec.

    Attributes:
        travel_s: the push and its answer are on the way: the worker may compute meanwhile.
        own_s: the worker encodes, decodes and copies.
    """

    travel_s: float
    own_s: float = 0.0


@dataclass(frozen=True)
class LocalPlan:
    """How a worker takes local steps.

    Attributes:
        steps: number of steps of a period.
        codec: codec of pushes and answers; empty: none.
        delay: steps for which the answer is not waited for.
        computing: share of the time in which it computes then.
    """

    steps: int
    codec: str
    delay: int
    computing: float

    def with_delay(self, delay: int) -> LocalPlan:
        """Return it with another delay, which the period must exceed."""
        return replace(self, steps=max(self.steps, delay + 1), delay=delay)

    @property
    def cost(self) -> str:
        """What it is expected to cost, in words."""
        if self.steps == 1 and not self.codec:
            return "It costs no loss"
        return "Published losses at equal samples are up to 9% above one process: compare with dist_sync"

    @property
    def arguments(self) -> str:
        """The arguments of a DistributedOptimizer that follow it."""
        words = [f'local_steps="{self.steps} by speed"']
        if self.delay:
            words.append(f"delay={self.delay}")
        if self.codec:
            words.append(f'compression={{"type": "{self.codec}", "leg": "both"}}')
        if self.codec == "chunktopk":
            words.append('outer={"lr": 1.0, "momentum": 0.0}')
        return ", ".join(words)

    def __str__(self) -> str:
        """Return it in words."""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        codec = f"{self.codec} both ways" if self.codec else "no codec"
        late = f", answers up to {self.delay} steps late" if self.delay else ""
        return f"periods of {steps}, {codec}{late}: {self.computing:.0%} of the time is computation"


def plan_period(step_s: float, exchange: ExchangeCost, codec: str = "") -> LocalPlan:
    """Return the shortest period with a codec, and how late answers may be; with the share of the time that results."""
    steps = 1
    while True:
        delay = _delay(steps, step_s, exchange)
        idle_s = exchange.own_s + max(0.0, exchange.travel_s - delay * step_s)
        computing = steps * step_s / (steps * step_s + idle_s)
        if computing >= COMPUTING or steps >= MOST_STEPS:
            return LocalPlan(steps, codec, delay, computing)
        steps += max(1, steps // 64)


def _delay(steps: int, step_s: float, exchange: ExchangeCost) -> int:
    """Return for how many steps answers of a period may be late: no longer than they need."""
    return min(math.floor(_LATE * steps), math.ceil(exchange.travel_s / step_s))


def plan_local(step_s: float, exchanges: Mapping[str, ExchangeCost]) -> LocalPlan:
    """Return the plan of the weakest codec whose period is short, or of the strongest one.

    Args:
        step_s: seconds of a step of the fastest worker.
        exchanges: by codec, those of :data:`CODECS` that may be taken.
    """
    plans = [plan_period(step_s, exchanges[codec], codec) for codec in CODECS if codec in exchanges]
    return next((one for one in plans if one.steps <= SHORT), plans[-1])
