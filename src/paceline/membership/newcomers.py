"""Checks of processes that want to join a job. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.config import Settings
from paceline.membership.effects import MemberKey, describe
from paceline.membership.roster import MemberRecord
from paceline.wire import messages as m


def objection(
    hello: m.Hello,
    settings: Settings,
    roster: Mapping[MemberKey, MemberRecord],
    is_ending: bool,
    deaths: Sequence[m.Death],
) -> str:
    """Return why a process cannot join, or an empty string."""
    who = f"{hello.role} {hello.rank} on {hello.host} (pid {hello.pid})"
    sizes = (settings.num_workers, settings.num_servers)
    if hello.job_id != settings.job_id:
        return f"{who} belongs to job {hello.job_id!r}, this is job {settings.job_id!r}"
    if is_ending:
        return f"{who} came when the job was ending" + "".join(f"; {describe(one)}" for one in deaths)
    if (hello.num_workers, hello.num_servers) != sizes:
        return f"{who} expects {hello.num_workers} workers and {hello.num_servers} servers, this job has {sizes}"
    return _objection_to_rank(who, hello, settings, roster)


def _objection_to_rank(who: str, hello: m.Hello, settings: Settings, roster: Mapping[MemberKey, MemberRecord]) -> str:
    size = _size(hello.role, settings)
    if hello.rank >= size:
        return f"{who}: this job has {size} {hello.role}s, ranks 0 to {size - 1}"
    record = roster.get((hello.role, hello.rank))
    if record is not None:
        return f"{who}: this rank is taken by {record}; start every process with its own rank"
    if hello.rank < 0 and free_rank(hello.role, settings, roster) < 0:
        return f"{who}: all {size} {hello.role}s of this job are there already"
    return ""


def free_rank(role: str, settings: Settings, roster: Mapping[MemberKey, MemberRecord]) -> int:
    """Return the lowest free rank of a role; -1 if there is none."""
    return next((rank for rank in range(_size(role, settings)) if (role, rank) not in roster), -1)


def _size(role: str, settings: Settings) -> int:
    return {"worker": settings.num_workers, "server": settings.num_servers}.get(role, 0)
