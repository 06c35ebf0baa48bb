"""Finds servers that hold workers up. Pure.

A server is slow when all workers wait for answers for much of their rounds, and it is busier than the other servers, or
out of its CPU quota, in some reports in a row. Gradients and quotas are measured, and need :data:`MEASURED` reports of
:data:`SHORTEST_S` together; what else it may be busy with (a checkpoint, new keys) needs :data:`REPORTS`. So many
reports without that are its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.observe.account import FIGURES, INTERVAL, QUEUED, RECEIVE, SERVER_PARTS, THROTTLED
from paceline.observe.history import middle, share_of
from paceline.observe.verdicts import Verdict

#: Part of their rounds that workers wait at least where a server is slow; its busy time as a multiple of the others',
#: and as a part of the time; and throttled time as a part of the time.
WAITED, BUSIER, BUSY, QUOTA = 0.15, 1.5, 0.3, 0.2

#: Reports in a row that change a server's state; those that do for a cause that is measured, and their seconds.
REPORTS, MEASURED, SHORTEST_S = 5, 2, 0.3

#: Windows of a server that tell what it does now, and windows before a verdict.
RECENT, FIRST = 3, 5

#: Part of the time without quota from which on a server may be slow.
SHORT_OF_QUOTA = 0.03

#: Causes that are measured.
_MEASURED = frozenset({"merge", "apply", "throttled"})


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
    windows: deque[Sequence[float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    hosts: deque[Sequence[int]] = field(default_factory=lambda: deque(maxlen=MEASURED))
    told: int = 0
    """Windows so far."""
    heard: int = 0
    """Number of its last heartbeat, among those of all members."""
    verdict: Verdict | None = None
    streak: int = 0
    """Reports in a row that speak for another state than the present one."""
    streak_s: float = 0.0
    """Their time."""
    since: int = 0
    """The last round when they began."""

    def take(self, windows: Sequence[Sequence[float]], figures: Sequence[int]) -> float:
        """Take a report; returns its seconds."""
        self.windows.extend(windows)
        self.told += len(windows)
        if len(figures) != len(FIGURES):
            return sum(map(sum, windows))
        self.hosts.append(tuple(figures))
        return 1e-6 * figures[INTERVAL]

    @property
    def is_suspect(self) -> bool:
        """Whether it is slow, or may be."""
        return self.verdict is not None or self.streak > 0 or share_of(self.hosts, THROTTLED) > SHORT_OF_QUOTA

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

    def are_quick(self, beat: int) -> bool:
        """Tell whether all have told since a heartbeat, and none may be slow.

        A slow one keeps messages waiting before it takes them, as a slow link does.
        """
        return all(one.heard > beat and not one.is_suspect for one in self._servers.values())

    def are_all_on(self, host: str) -> bool:
        """Tell whether all that have told are on a host: no link is between them and its workers."""
        return bool(self._servers) and all(one.host == host for one in self._servers.values())

    @property
    def verdicts(self) -> list[Verdict]:
        """The servers that are slow now."""
        return [one.verdict for one in self._servers.values() if one.verdict is not None]

    def note(
        self,
        rank: int,
        host: str,
        windows: Iterable[Sequence[float]],
        figures: Sequence[int],
        waits: Callable[[], WaitShare],
        beat: int = 0,
    ) -> list[Verdict]:
        """Take a server's seconds by part of each window, and figures of its host; returns a change of its state.

        Heartbeats (``beat``) are numbered among those of all members.
        """
        server = self._servers.setdefault(rank, _Server(rank, host))
        server.heard, seconds = beat, server.take(list(windows), figures)
        found = self._verdict(server, waits) if server.told >= FIRST else None
        if (found is None) == (server.verdict is None):
            server.streak, server.streak_s = 0, 0.0
            return []
        server.since = server.since if server.streak else waits().round
        server.streak, server.streak_s = server.streak + 1, server.streak_s + seconds
        is_measured = found is not None and found.cause in _MEASURED and server.streak_s >= SHORTEST_S
        if server.streak < (MEASURED if is_measured else REPORTS):
            return []
        server.streak, server.streak_s, server.verdict = 0, 0.0, found
        return [found or Verdict(rank, host, "", -1, 1.0, 0.0, server.since, 0.0, role="server")]

    def _verdict(self, server: _Server, told: Callable[[], WaitShare]) -> Verdict | None:
        shares, busy = server.shares, server.busy
        others = [one.busy for one in self._servers.values() if one is not server and one.windows]
        ratio = busy / max(middle(others), 0.01) if others else 1.0
        throttled = share_of(server.hosts, THROTTLED)
        if not (throttled > QUOTA or (ratio > BUSIER and busy > BUSY)):
            return None
        waits = told()
        if waits.share < WAITED:
            return None
        part = max((part for part in range(len(shares)) if part != RECEIVE), key=lambda one: shares[one])
        cause = "throttled" if throttled > QUOTA else SERVER_PARTS[part]
        # A server that waits for its quota may do nothing else, and each of its processors counts in what is throttled.
        held = min(0.99, waits.share * max(throttled, 1 - 1 / max(1.0, ratio)))
        lost = waits.rate * held / (1 - held)
        since = server.since if server.streak else waits.round
        return Verdict(server.rank, server.host, cause, part, ratio, busy, since, lost, role="server")
