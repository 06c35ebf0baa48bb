"""The history of a job for its page: bounded, however long the job takes. Pure.

The last points of a lane stay as they are. Older ones are joined to longer ones of about equal length: whenever there
are too many of them, neighbours are joined in pairs. All values of a point are sums over its time, so those of joined
points are, too. ``page.html`` does the same with the points that it gets one by one.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from paceline.observe.account import parts_of
from paceline.observe.job_view import JobView, MemberView, figures_of
from paceline.wire import messages as m

#: Points of a lane that stay as they are, and older ones; the same of the job's rate; and events.
LANE, RATE, MOST_EVENTS = (180, 240), (400, 600), 200

#: Weight of the last second in the traffic that is shown.
_FRESH = 0.3


class Point(NamedTuple):
    """A stretch of time, in seconds since the start of the history, and sums over it."""

    start: float
    span: float
    sums: tuple[float, ...]

    def joined(self, later: Point) -> Point:
        """Return both stretches as one."""
        end = max(self.start + self.span, later.start + later.span)
        sums = tuple(round(one + two, 3) for one, two in zip(self.sums, later.sums, strict=True))
        return Point(self.start, round(end - self.start, 3), sums)


class Series:
    """Points that follow each other.

    Args:
        recent: number of the last points, which stay as they are.
        older: number of the points before, at most.
    """

    def __init__(self, recent: int, older: int) -> None:
        self._recent: deque[Point] = deque()
        self._older: list[Point] = []
        self._most, self._most_older, self._length = recent, older, 0.0

    def add(self, point: Point) -> None:
        """Add the next point."""
        self._recent.append(point)
        if len(self._recent) > self._most:
            self._keep(self._recent.popleft())

    def _keep(self, point: Point) -> None:
        older = self._older
        if older and older[-1].span + point.span <= self._length:
            older[-1] = older[-1].joined(point)
        else:
            older.append(point)
        if len(older) > self._most_older:
            pairs = [older[index : index + 2] for index in range(0, len(older), 2)]
            self._older = [pair[0].joined(pair[-1]) if len(pair) == 2 else pair[0] for pair in pairs]
            self._length = 2 * (older[-1].start + older[-1].span - older[0].start) / len(older)

    def copy(self) -> dict[str, Any]:
        """Return all of it, for a page that goes on from here."""
        return {
            "recent": list(self._recent), "older": list(self._older), "length": self._length,
            "limits": [self._most, self._most_older],
        }  # fmt: skip


class PageHistory:
    """The history of a job: its rate, the parts of its members' time, and events.

    Args:
        began: seconds since 1970.
        now: the same moment in seconds on the caller's clock.
    """

    def __init__(self, job: str, workers: int, servers: int, began: float, now: float) -> None:
        parts = {role: parts_of(role) for role in ("worker", "server")}
        self._about = {"job": job, "began": began, "parts": parts, "lane_limits": LANE}
        self._workers, self._servers, self._began, self._last = workers, servers, now, 0.0
        self._rate = Series(*RATE)
        self._lanes: dict[str, Series] = {}
        self._whole: dict[str, tuple[m.Window, float]] = {}
        self._traffic: dict[str, tuple[int, int, float, float]] = {}
        self._phases: dict[str, str] = {}
        self._told = -1.0
        self._events: deque[tuple[float, str]] = deque(maxlen=MOST_EVENTS)
        self._state: dict[str, Any] = {}

    def note(self, status: m.Status, now: float) -> dict[str, Any]:
        """Take the status of now; returns all that a page gets that knows the history so far."""
        at = max(round(now - self._began, 3), self._last)
        span, self._last = max(round(at - self._last, 3), 0.001), at
        job = JobView(status, self._workers, self._servers)
        rate = Point(round(at - span, 3), span, (round(job.rate * span, 3),))
        self._rate.add(rate)
        lanes = {one.name: point for one in job.members if (point := self._point(one, at)) is not None}
        for name, point in lanes.items():
            self._lanes.setdefault(name, Series(*LANE)).add(point)
        events = self._happened(job, at)
        self._events += events
        self._state = {
            "at": at,
            "head": job.progress,
            "round": job.round,
            "rate": round(job.rate, 3),
            "rows": [one.as_json() | {"name": one.name} | self._rates(one, span) for one in job.members],
            "slow": status.verdicts,
            "auto": status.auto,
            "figures": figures_of(status.figures),
            "cohorts": status.cohorts,
            "staleness": status.staleness,
        }
        return {"state": self._state, "rate": rate, "lanes": lanes, "events": events}

    def copy(self) -> dict[str, Any]:
        """Return all of it, for a page that begins now."""
        lanes = {name: lane.copy() for name, lane in self._lanes.items()}
        return {**self._about, "state": self._state, "rate": self._rate.copy(), "lanes": lanes,
                "events": list(self._events)}  # fmt: skip

    def _point(self, one: MemberView, at: float) -> Point | None:
        """Return the time of a member since its last point; None: it has told of none."""
        now = one.whole
        before, end = self._whole.get(one.name, (m.Window(0, 0, 0.0, [0] * len(now.parts)), None))
        if now.rounds < before.rounds:  # the account has begun anew
            before = m.Window(0, 0, 0.0, [0] * len(now.parts))
        parts = [new - old for new, old in zip(now.parts, before.parts, strict=True)]
        if sum(parts) <= 0:
            return None
        start = max(0.0, at - 1e-6 * sum(parts)) if end is None else end
        self._whole[one.name] = now, at
        sums = (now.rounds - before.rounds, round(now.samples - before.samples, 3), *parts)
        return Point(round(start, 3), round(max(at - start, 0.001), 3), sums)

    def _rates(self, one: MemberView, span: float) -> dict[str, float]:
        """Return bytes per second that a member sends and receives, of late."""
        sent, received = one.state.sent, one.state.received
        before = self._traffic.get(one.name, (sent, received, 0.0, 0.0))
        fresh = (max(0, sent - before[0]) / span, max(0, received - before[1]) / span)
        sends, receives = ((1 - _FRESH) * old + _FRESH * new for old, new in zip(before[2:], fresh, strict=True))
        self._traffic[one.name] = sent, received, sends, receives
        return {"sends": round(sends), "receives": round(receives)}

    def _happened(self, job: JobView, at: float) -> list[tuple[float, str]]:
        """Return the events since the last call: joined, left, silent and dead members, and verdicts."""
        events = []
        reasons = {f"{one.role} {one.rank}": one.reason for one in job.status.deaths}
        for one in job.members:
            name, phase, before = one.name, one.state.phase, self._phases.get(one.name, "")
            if phase != before:
                self._phases[name] = phase
                verb = {"live": "is heard again" if before else "has joined", "left": "has left", "silent": "is silent"}
                verb["leaving"] = "is to leave"
                death = f"has died: {reasons.get(name, 'the reason is not known')}"
                events.append((at, f"{name} on {one.member.host} {verb.get(phase, death)}"))
        told = [(round(at - verdict.ago_s, 3), verdict.text) for verdict in job.status.told]
        new = [verdict for verdict in told if verdict[0] > self._told + 0.002]
        self._told = max([self._told, *(when for when, _ in new)])
        return [*events, *new]
