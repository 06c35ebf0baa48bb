"""One view of a job, made of the scheduler's status. Every picture of a job is made of it. Pure.

| picture | made by |
|---|---|
| text and JSON of ``paceline status`` | ``cli/status.py``, :meth:`JobView.as_json` |
| ``paceline top``, and the panel | ``launch/picture.py`` |
| lines of a job without a terminal | ``launch/supervise/job_watch.py`` |
| the page of the job | ``page_history.py`` |
| metrics for Prometheus | ``prometheus.py`` |
| figures for trackers | ``tracking.py`` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.naming import listed, workers_text
from paceline.observe.account import parts_of
from paceline.observe.table import duration
from paceline.wire import messages as m


def figures_of(last: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """Return reported figures by name, each with its step."""
    return {name: {"step": step, "value": value} for name, (step, value) in last.items()}


def change_text(change: m.Change) -> str:
    """Return a change of the membership in words."""
    who, why = workers_text(change.workers), f": {change.why}" if change.why else ""
    match change.kind:
        case "starts":
            return f"the job starts with {who}"
        case "regroups":
            groups = listed((" ".join(map(str, group)) for group in change.groups), 8)
            return f"groups from now on: {groups}"
        case "walks":
            return f"{change.why} begins"
        case "joins":
            return f"{who} joins after round {change.round}{why}"
    return f"{who} {change.kind} after round {change.round}{why}"


@dataclass(frozen=True)
class MemberView:
    """One process of a job.

    Attributes:
        name: its role and rank.
        waits_for: ranks of the workers that it waits for.
        shares: share of each part in its time, of late; empty: it has told of none.
        samples_per_s: rate of a worker, of late; 0: not known.
        whole: the account of all its rounds.
    """

    member: m.Member
    state: m.MemberState
    waits_for: list[int]
    name: str
    shares: Mapping[str, float]
    samples_per_s: float
    whole: m.Window

    @classmethod
    def of(cls, member: m.Member, state: m.MemberState, slowest: int, last: list[int]) -> MemberView:
        """Return the view of a process; ``last`` are the workers in the slowest round."""
        waits = [int(rank) for rank in state.waits_for.split()]
        if _works(member, state) and not waits and state.round > slowest:
            waits = last
        parts, nothing = parts_of(member.role), m.Window(0, 0, 0.0, [0] * len(parts_of(member.role)))
        [recent], [whole] = state.recent or [nothing], state.whole or [nothing]
        spent = sum(recent.parts) or 1
        shares = {name: part / spent for name, part in zip(parts, recent.parts, strict=False)} if state.recent else {}
        rate = 1e6 * recent.samples / spent if member.role == "worker" else 0.0
        return cls(member, state, waits, f"{member.role} {member.rank}", shares, rate, whole)

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker."""
        return self.member.role == "worker"

    @property
    def is_there(self) -> bool:
        """Whether it has neither left nor died."""
        return self.state.phase in ("live", "silent", "leaving")

    def as_json(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        member, state = self.member, self.state
        parts = {name: round(share, 4) for name, share in self.shares.items()}
        if self.is_worker and self.shares:
            parts["samples_per_s"] = round(self.samples_per_s, 3)
        return {
            "role": member.role, "rank": member.rank, "host": member.host, "pid": member.pid, "state": state.phase,
            "round": state.round, "pace": round(state.pace, 3), "step_s": round(state.step_s, 6),
            "waits_for": self.waits_for, "sent": state.sent, "received": state.received, "memory": state.memory,
            "silent_s": round(state.silent_s, 3), "parts": parts, "came_last": state.came_last,
            "late_s": round(state.late_s, 3), "values": state.held[0], "buckets": state.held[1],
            "figures": figures_of(state.figures),
        }  # fmt: skip


class JobView:
    """A job, as its scheduler's status has it.

    Args:
        workers: how many the job is to have, and ``servers``; 0: not known.

    Attributes:
        members: its processes, as in the status.
        workers: those of them that are workers, and ``servers``.
    """

    def __init__(self, status: m.Status, workers: int = 0, servers: int = 0) -> None:
        self.status, self._wanted = status, (("server", servers), ("worker", workers))
        pairs = list(zip(status.members, status.states, strict=True))
        rounds = [(one.round, member.rank) for member, one in pairs if _works(member, one)]
        slowest = min((round for round, _ in rounds), default=0)
        last = [rank for round, rank in rounds if round == slowest]
        self.members = [MemberView.of(member, one, slowest, last) for member, one in pairs]
        self.workers = [one for one in self.members if one.is_worker]
        self.servers = [one for one in self.members if one.member.role == "server"]

    @property
    def round(self) -> int:
        """The last round of any worker."""
        return max((one.state.round for one in self.workers), default=0)

    @property
    def rate(self) -> float:
        """Samples per second of all live workers, of late."""
        return sum(one.samples_per_s for one in self.workers if one.state.phase == "live")

    @property
    def missing(self) -> list[str]:
        """The processes that have not joined the job, servers first."""
        joined = {one.name for one in self.members}
        return [
            name for role, count in self._wanted for rank in range(count) if (name := f"{role} {rank}") not in joined
        ]

    @property
    def progress(self) -> list[str]:
        """How far the job is: its start, or its round and rate."""
        absent = self.missing
        if absent and not self.status.deaths:
            count = sum(count for _, count in self._wanted)
            return [f"{count - len(absent)} of {count} processes have joined", f"not yet: {listed(absent, 4)}"]
        if not self.round:
            return ["no step yet" if absent else "all have joined, no step yet"]
        far, rate = self._way_to_the_last_step, self.rate
        return [far[0] if far else f"round {self.round:,}", *([f"{rate:,.0f} samples/s"] if rate else []), *far[1:]]

    @property
    def _way_to_the_last_step(self) -> list[str]:
        """Step and total of the worker that takes longest, and how long that is; nothing where no total is known."""
        states = [one.state for one in self.members if one.state.phase == "live"]
        ways = [one.progress for one in states if one.progress is not None]
        if not ways:
            return []
        last = max(ways, key=lambda way: (way.left_s or 0.0, -way.step))
        text = f"step {last.step:,} of {last.total:,}"
        return [text] if last.left_s is None else [text, f"{duration(last.left_s)} left"]

    @property
    def slowest(self) -> str:
        """The worker with the longest steps; nothing where there are not two to compare."""
        timed = [one for one in self.workers if one.state.step_s and one.state.phase == "live"]
        if len(timed) < 2:
            return ""
        last = max(timed, key=lambda one: one.state.step_s)
        return f"slowest: {last.name} on {last.member.host} ({1000 * last.state.step_s:.0f} ms a step)"

    @property
    def gone(self) -> list[str]:
        """A line for each worker that has left while others train on."""
        first = max((one.state.round for one in self.workers if one.state.phase == "live"), default=0)
        return [
            f"{one.name} on {one.member.host} left the job after round {one.state.round}; others are in round {first}"
            for one in self.workers
            if one.state.phase == "left" and one.state.round < first
        ]

    def changes(self, *without: str) -> list[str]:
        """Return lines about the last changes of the membership, but for some kinds."""
        shown = (one for one in self.status.changes if one.kind not in without)
        return [f"{duration(one.ago_s)} ago: {change_text(one)}" for one in shown]

    def as_json(self, job: str, choice: str = "") -> dict[str, Any]:
        """Return the job for ``paceline status --json``; ``choice`` is what the launcher has chosen, and why."""
        status = self.status
        more = {
            "choice": choice,
            "revised": status.auto,
            "slow": status.verdicts,
            "weighing": status.weighing,
            "figures": figures_of(status.figures),
        }
        changes = [_change(one) for one in status.changes]
        return {
            "job": job,
            "processes": [one.as_json() for one in self.members],
            **{name: value for name, value in more.items() if value},
            "changes": changes,
        }


def _works(member: m.Member, state: m.MemberState) -> bool:
    return member.role == "worker" and state.phase in ("live", "silent", "leaving")


def _change(change: m.Change) -> dict[str, Any]:
    names = ("generation", "kind", "workers", "round", "why")
    known = msgspec.structs.asdict(change)
    return {"ago_s": round(change.ago_s, 3), "text": change_text(change), **{name: known[name] for name in names}}
