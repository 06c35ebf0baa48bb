"""The scheduler's status as a mapping per process, and as words for the whole job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.naming import listed
from paceline.observe.account import parts_of
from paceline.observe.table import duration
from paceline.wire import messages as m


def rows_of(status: m.Status) -> list[dict[str, Any]]:
    """Return a mapping per process."""
    pairs = list(zip(status.members, status.states, strict=True))
    work = [(one.round, member.rank) for member, one in pairs if _works(member, one)]
    slowest = min((round for round, _ in work), default=0)
    last = [rank for round, rank in work if round == slowest]
    return [_row(member, one, slowest, last) for member, one in pairs]


def figures_of(last: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """Return reported figures by name, each with its step."""
    return {name: {"step": step, "value": value} for name, (step, value) in last.items()}


def missing(status: m.Status, workers: int, servers: int) -> list[str]:
    """Return those of so many processes that have not joined the job, servers first."""
    joined = {(member.role, member.rank) for member in status.members}
    wanted = (("server", servers), ("worker", workers))
    return [f"{role} {rank}" for role, count in wanted for rank in range(count) if (role, rank) not in joined]


def progress(
    status: m.Status, workers: int, servers: int, rows: Sequence[Mapping[str, Any]] | None = None
) -> list[str]:
    """Return how far a job of so many processes is: its start, or its round and rate."""
    absent = missing(status, workers, servers)
    if absent and not status.deaths:
        count = workers + servers
        return [f"{count - len(absent)} of {count} processes have joined", f"not yet: {listed(absent, 4)}"]
    rows = rows_of(status) if rows is None else rows
    first, rate = max((row["round"] for row in rows if row["role"] == "worker"), default=0), rate_of(rows)
    if not first:
        return ["no step yet" if absent else "all have joined, no step yet"]
    far = _way_to_the_last_step(status)
    return [far[0] if far else f"round {first:,}", *([f"{rate:,.0f} samples/s"] if rate else []), *far[1:]]


def _way_to_the_last_step(status: m.Status) -> list[str]:
    """Return step and total of the worker that takes longest, and how long that is; nothing where no total is known."""
    ways = [one.progress for one in status.states if one.phase == "live" and one.progress is not None]
    if not ways:
        return []
    last = max(ways, key=lambda way: (way.left_s or 0.0, -way.step))
    text = f"step {last.step:,} of {last.total:,}"
    return [text] if last.left_s is None else [text, f"{duration(last.left_s)} left"]


def rate_of(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the samples per second of all live workers, of late."""
    return float(sum(row["parts"].get("samples_per_s", 0.0) for row in rows if row["state"] == "live"))


def slowest(status: m.Status) -> str:
    """Return the worker with the longest steps; nothing where there are not two to compare."""
    timed = [row for row in rows_of(status) if row["step_s"] and row["state"] == "live"]
    if len(timed) < 2:
        return ""
    last = max(timed, key=lambda row: row["step_s"])
    return f"slowest: worker {last['rank']} on {last['host']} ({1000 * last['step_s']:.0f} ms a step)"


def _works(member: m.Member, state: m.MemberState) -> bool:
    return member.role == "worker" and state.phase in ("live", "silent", "leaving")


def _row(member: m.Member, state: m.MemberState, slowest: int, last: list[int]) -> dict[str, Any]:
    """Return the mapping of a process; ``last`` are the workers in the slowest round."""
    waits = [int(rank) for rank in state.waits_for.split()]
    if _works(member, state) and not waits and state.round > slowest:
        waits = last
    return {
        "role": member.role,
        "rank": member.rank,
        "host": member.host,
        "pid": member.pid,
        "state": state.phase,
        "round": state.round,
        "pace": round(state.pace, 3),
        "step_s": round(state.step_s, 6),
        "waits_for": waits,
        "sent": state.sent,
        "received": state.received,
        "memory": state.memory,
        "silent_s": round(state.silent_s, 3),
        "parts": _parts(member.role, state.recent),
        "came_last": state.came_last,
        "late_s": round(state.late_s, 3),
        "values": state.held[0],
        "buckets": state.held[1],
        "figures": figures_of(state.figures),
    }


def _parts(role: str, recent: Sequence[m.Window]) -> dict[str, float]:
    """Return the share of each part in the time of a process, of late; and a worker's samples per second."""
    if not recent:
        return {}
    (last,) = recent
    whole = sum(last.parts) or 1
    shares = {name: round(part / whole, 4) for name, part in zip(parts_of(role), last.parts, strict=False)}
    return shares | ({"samples_per_s": round(1e6 * last.samples / whole, 3)} if role == "worker" else {})
