"""Resources of a simulated job: a link that flows share, and a processor that serves one after the other."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.errors import MissingExtraError


def new_environment() -> Any:
    """Return simpy's environment: a clock, and the events of one simulation.

    Raises:
        MissingExtraError: simpy is not installed.
    """
    try:
        import simpy
    except ImportError:
        raise MissingExtraError("the simulator needs simpy: pip install 'paceline[sim]'") from None
    return simpy.Environment()


class SharedLink:
    """A link whose bandwidth all flows share equally at any time.

    Instead of the remaining bytes of each flow it keeps how many bytes every flow has got since the beginning of time.
    So a flow's arrival or end costs a logarithm, however many flows there are.

    Args:
        bandwidth: bytes per second of all flows together; infinite: flows take no time.
    """

    def __init__(self, environment: Any, bandwidth: float) -> None:
        self._environment, self._bandwidth = environment, bandwidth
        self._given, self._since = 0.0, 0.0
        self._flows: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0
        self._numbers = itertools.count()
        self._alarm = 0
        self.bytes = 0.0
        """Bytes of all flows so far."""

    def send(self, size: float, then: Callable[[], None], count: int = 1) -> None:
        """Start ``count`` flows of ``size`` bytes each and call ``then`` once, at their common end."""
        self.bytes += size * count
        if math.isinf(self._bandwidth) or size <= 0:
            then()
            return
        self._advance()
        heapq.heappush(self._flows, (self._given + size, next(self._numbers), count, then))
        self._count += count
        self._set_alarm()

    def _advance(self) -> None:
        now = self._environment.now
        if self._flows:
            self._given += (now - self._since) * self._bandwidth / self._count
        self._since = now

    def _set_alarm(self) -> None:
        """Wake when the flow with the fewest bytes left ends, if none begins or ends before."""
        self._alarm += 1
        if self._flows:
            wait = max(0.0, (self._flows[0][0] - self._given) * self._count / self._bandwidth)
            call_later(self._environment, wait, partial(self._wake, self._alarm))

    def _wake(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self._advance()
        ended = []
        # The rest that the clock is too coarse to wait for counts as sent.
        rest = 2 * math.ulp(self._since) * self._bandwidth / self._count
        while self._flows and self._flows[0][0] <= self._given * (1 + 1e-12) + max(1e-9, rest):
            _, _, count, then = heapq.heappop(self._flows)
            self._count -= count
            ended.append(then)
        self._set_alarm()
        for then in ended:
            then()


class Processor:
    """Serves one job after the other, in the order in which they come."""

    def __init__(self, environment: Any) -> None:
        self._environment, self._free_at = environment, 0.0

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        """Take a job and call ``then`` when it is done."""
        now = self._environment.now
        self._free_at = max(now, self._free_at) + seconds
        call_later(self._environment, self._free_at - now, then)


def call_later(environment: Any, seconds: float, then: Callable[[], None]) -> None:
    """Call a function after some simulated time; after none, at once."""
    if seconds <= 0:
        then()
    else:
        environment.timeout(seconds).callbacks.append(lambda _: then())
