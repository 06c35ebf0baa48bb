"""Finds servers that hold workers up. Pure.

A server is slow when all workers wait for answers for much of their rounds, and it is busier than the other servers, or
out of its CPU quota, in :data:`REPORTS` reports in a row. As many reports without that are its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.observe.account import FIGURES, QUEUED, RECEIVE, SERVER_PARTS, THROTTLED
from paceline.observe.history import USUAL, middle, share_of
from paceline.observe.verdicts import Verdict

#: Part of their rounds that workers wait at least where a server is slow; its busy time as a multiple of the others',
#: and as a part of the time; and throttled time as a part of the time.
WAITED, BUSIER, BUSY, QUOTA = 0.25, 1.5, 0.3, 0.2

#: Reports in a row that change a server's state.
REPORTS = 5


@dataclass(frozen=True)
class WaitShare:
    """The waits of workers for servers."""

    share: float
    """Least part of its rounds that a worker waits."""
    round: int
    """The last round."""
    rate: float
    """Samples per second of all workers."""


@dataclass
class _Server:
    """A server's last windows, and the present state of its verdict."""

    rank: int
    host: str
    windows: deque[Sequence[float]] = field(default_factory=lambda: deque(maxlen=USUAL))
    hosts: deque[Sequence[int]] = field(default_factory=lambda: deque(maxlen=REPORTS))
    verdict: Verdict | None = None
    streak: int = 0
    """Reports in a row that speak for another state than the present one."""

    @property
    def shares(self) -> list[float]:
        """The parts of its time."""
        sums = [sum(column) for column in zip(*self.windows, strict=True)]
        whole = sum(sums) or 1.0
        return [one / whole for one in sums]

    @property
    def busy(self) -> float:
        """The part of its time in which it has worked, without waits for a processor: those say nothing about it."""
        return max(0.0, 1 - self.shares[RECEIVE] - share_of(self.hosts, QUEUED))


class SlowServers:
    """Takes the accounts of servers, and returns changes."""

    def __init__(self) -> None:
        self._servers: dict[int, _Server] = {}

    @property
    def verdicts(self) -> list[Verdict]:
        """The servers that are slow now."""
        return [one.verdict for one in self._servers.values() if one.verdict is not None]

    def note(
        self, rank: int, host: str, windows: Iterable[Sequence[float]], figures: Sequence[int], waits: WaitShare
    ) -> list[Verdict]:
        """Take the account of a server; returns a change of its state.

        Args:
            rank: its rank.
            host: its host.
            windows: seconds by part.
            figures: figures of its host.
            waits: how long workers wait.
        """
        server = self._servers.setdefault(rank, _Server(rank, host))
        server.windows.extend(windows)
        if len(figures) == len(FIGURES):
            server.hosts.append(tuple(figures))
        found = self._verdict(server, waits) if len(server.windows) >= REPORTS else None
        if (found is None) == (server.verdict is None):
            server.streak = 0
            return []
        server.streak += 1
        if server.streak < REPORTS:
            return []
        server.streak, server.verdict = 0, found
        return [found or Verdict(rank, host, "", -1, 1.0, 0.0, waits.round, 0.0, role="server")]

    def _verdict(self, server: _Server, waits: WaitShare) -> Verdict | None:
        shares, busy = server.shares, server.busy
        others = [one.busy for one in self._servers.values() if one is not server and one.windows]
        ratio = busy / max(middle(others), 0.01) if others else 1.0
        throttled = share_of(server.hosts, THROTTLED)
        if waits.share < WAITED or not (throttled > QUOTA or (ratio > BUSIER and busy > BUSY)):
            return None
        part = max((part for part in range(len(shares)) if part != RECEIVE), key=lambda one: shares[one])
        cause = "throttled" if throttled > QUOTA else SERVER_PARTS[part]
        held = waits.share * max(throttled, 1 - 1 / ratio)
        lost = waits.rate * held / (1 - held)
        return Verdict(server.rank, server.host, cause, part, ratio, busy, waits.round, lost, role="server")
