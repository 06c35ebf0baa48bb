"""``local_steps="auto"``: period and codec from the measured link and step, followed while these change.

| event at a worker                  | it                                                                           |
|------------------------------------|------------------------------------------------------------------------------|
| the first few steps are taken      | probes its link and its codecs, gathers the results, and plans with all      |
| an exchange is over                | notes how long that travelled, and what it did for it itself                 |
| a push leaves                      | tells these to the others, in lock step                                      |
| the answer comes                   | plans the next period with what all have told                                |

All workers plan with the same numbers, so they have the same plan. Where workers do not wait for each other, each plans
for itself after the first plan.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import torch

from paceline import compression
from paceline.consistency import Policy
from paceline.hetero.local_plan import CODECS, ELEMENT_BYTES, ExchangeCost, LocalPlan, plan_local, plan_period
from paceline.kvstore.dist import DistStore

logger = logging.getLogger(__name__)

#: Bytes of probes, and the time from which on a probe is large enough.
_PROBES, _LONG_S = (16 * 1024, 128 * 1024, 1024 * 1024), 0.25

#: Times that each probe is made: the least counts.
_TRIES = 2

#: Elements that a codec is tried with.
_TRIED = 256 * 1024

#: Exchanges whose median counts, and the change of a period from which on it is said.
_LAST, _SAID = 3, 1.5

_NOTE = struct.Struct("<3f")


class AutoPeriod:
    """Chooses the period, the codec and the delay of local steps.

    Args:
        store: the workers' store.
        elements: parameters that are exchanged.
        codec: a codec that was given; None: it is chosen.
        delay: a delay that was given; None: it is chosen.

    Attributes:
        plan: None: nothing is measured yet.
    """

    def __init__(self, store: DistStore, elements: int, codec: str | None, delay: int | None) -> None:
        self._store, self._elements, self._codec, self._delay = store, elements, codec, delay
        self.plan: LocalPlan | None = None
        self._told: deque[ExchangeCost] = deque(maxlen=_LAST)
        self._said = 0

    # ---- the first plan --------------------------------------------------------------------------------------------

    def decide(self, step_s: float) -> LocalPlan:
        """Measure, and plan with all workers. Every worker calls it."""
        began = time.monotonic()
        fixed_s, byte_s = self._probe()
        own = {codec: _own_s(codec, self._elements) for codec in CODECS}
        mine = struct.pack(f"<{3 + len(own)}d", step_s, fixed_s, byte_s, *own.values())
        found = [one for one in self._store.session.gather(f"{self._store.name}/auto", mine) if one]
        columns = list(zip(*(struct.unpack(f"<{3 + len(own)}d", one) for one in found), strict=True))
        fastest_s, fixed_s, byte_s = min(columns[0]), max(columns[1]), max(columns[2])
        exchanges = {
            codec: ExchangeCost(fixed_s + 2 * self._elements * ELEMENT_BYTES.get(codec, 4.0) * byte_s, max(own_s))
            for codec, own_s in zip(own, columns[3:], strict=True)
        }
        self.plan = self._with_delay(self._planned(fastest_s, exchanges))
        self._said = self.plan.steps
        if self._store.rank == 0:
            travel_s = exchanges[self.plan.codec].travel_s
            logger.warning(
                "local_steps='auto': %s. Measured in %.1f s: a step takes %.3g s, an exchange %.3g s. %s",
                self.plan, time.monotonic() - began, fastest_s, travel_s, self.plan.cost,
            )  # fmt: skip
        return self.plan

    def _planned(self, step_s: float, exchanges: Mapping[str, ExchangeCost]) -> LocalPlan:
        if self._codec is None:
            return plan_local(step_s, exchanges)
        return plan_period(step_s, exchanges.get(self._codec, exchanges[""]), self._codec)

    def _with_delay(self, plan: LocalPlan) -> LocalPlan:
        return plan if self._delay is None else plan.with_delay(self._delay)

    def _probe(self) -> tuple[float, float]:
        """Return the seconds of an exchange of nothing, and those of a byte on its way, while all workers send."""
        times: list[tuple[int, float]] = []
        servers = max(1, len(self._store.session.servers))
        for size in _PROBES:
            store = self._store.sibling("probe", mean=True, policy=Policy())
            length = max(1, size // 4 // servers)
            values = [torch.zeros(length, device="cpu", dtype=torch.float32) for _ in range(servers)]
            store.init(list(range(servers)), values)
            seconds = min(_round_s(store, values) for _ in range(_TRIES))
            store.close()
            slowest = max(map(_number, self._store.session.gather(f"{store.name}/seconds", struct.pack("<d", seconds))))
            times.append((2 * 4 * servers * len(values[0]), slowest))
            if slowest > _LONG_S:
                break
        return _line(times)

    # ---- later plans -----------------------------------------------------------------------------------------------

    def note(self, travel_s: float, own_s: float) -> None:
        """Note an exchange that is over."""
        self._told.append(ExchangeCost(travel_s, own_s))

    def tell(self, step_s: float) -> bytes:
        """Return a note for the other workers; empty before the first exchange is over."""
        if not self._told or self.plan is None:
            return b""
        travel_s = median(one.travel_s for one in self._told)
        return _NOTE.pack(step_s, travel_s, median(one.own_s for one in self._told))

    def follow(self, notes: Sequence[bytes]) -> LocalPlan | None:
        """Plan with what all workers have told; None: the plan stays."""
        told = [_NOTE.unpack(one) for one in notes if len(one) == _NOTE.size]
        if not told or self.plan is None:
            return None
        steps, travels, owns = zip(*told, strict=True)
        step_s = min((one for one in steps if one > 0), default=0.0)
        if not step_s > 0:
            return None
        plan = self._with_delay(plan_period(step_s, ExchangeCost(max(travels), max(owns)), self.plan.codec))
        self.plan = plan
        if self._store.rank == 0 and not self._said / _SAID < plan.steps < self._said * _SAID:
            self._said = plan.steps
            logger.warning("local_steps='auto': the link or the steps have changed: %s", plan)
        return plan


def _round_s(store: DistStore, values: Sequence[torch.Tensor]) -> float:
    """Return how long a push of all workers and its answer take."""
    store.barrier()
    began = time.monotonic()
    store.pushpull(list(range(len(values))), list(values))
    return time.monotonic() - began


def _number(packed: bytes) -> float:
    return float(struct.unpack("<d", packed)[0]) if packed else 0.0


def _line(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the time of no byte, and of one, from the times of the last two sizes."""
    (few, short_s), (many, long_s) = times[-2:] if len(times) > 1 else ((0, 0.0), times[0])
    byte_s = max(0.0, long_s - short_s) / (many - few)
    return max(0.0, long_s - byte_s * many), byte_s


def _own_s(codec: str, elements: int) -> float:
    """Return how long this worker encodes, decodes and copies so many elements."""
    tried = min(_TRIED, elements)
    one = torch.linspace(-1.0, 1.0, tried, device="cpu", dtype=torch.float32)  # not from the script's generator
    other = torch.zeros_like(one)
    coded, seconds = compression.make(codec or None), math.inf
    state = None if coded is None else coded.new_state(tried)
    for _ in range(_TRIES + 1):
        began = time.monotonic()
        other.copy_(one).sub_(one)
        one.add_(other)
        if coded is not None and state is not None:
            coded.decode_add(coded.encode(one, state), other)
        seconds = min(seconds, time.monotonic() - began)
    return seconds * elements / tried
