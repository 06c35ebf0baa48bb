"""This process's part of a trace: its events, for as long as the scheduler wants them."""

from __future__ import annotations

import time

from paceline.observe import ring
from paceline.observe.clocks import RoundTrips
from paceline.observe.events import RECORD
from paceline.wire import messages as m
from paceline.wire.limits import MAX_TRACE_BYTES

#: Events that one heartbeat brings at most.
MOST = MAX_TRACE_BYTES // RECORD.size


class Recording:
    """Hands over the events of this process since a trace began.

    Attributes:
        wanted: number of the trace; 0: none.
        has_more: there are more events than the last heartbeat could bring.
    """

    def __init__(self) -> None:
        self.wanted, self.has_more = 0, False
        self._trace, self._since, self._sent = 0, 0.0, 0

    def take(self, clock: RoundTrips) -> m.TraceEvents | None:
        """Return events for one heartbeat; None: no trace is made."""
        made, self.has_more = ring.active, False
        if not self.wanted:
            return None
        now = time.monotonic()
        if self._trace != self.wanted:
            self._trace, self._since, self._sent = self.wanted, now, made.written if made else 0
        records, lost = made.since(self._sent, MOST) if made is not None else (b"", 0)
        self._sent += lost + len(records) // RECORD.size
        self.has_more = made is not None and made.written - self._sent >= MOST // 2
        error = min(clock.error(now), 1e6)
        unix = time.time() - time.monotonic()
        return m.TraceEvents(self._trace, self._since, now, unix, clock.offset, error, lost, records)
