"""``paceline status``: the members of a job, their progress, and those it waits for."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.cli.options import Option, Parser, UsageError
from paceline.cli.table import quantity, table
from paceline.config import Settings
from paceline.errors import LaunchError
from paceline.launch import runtime
from paceline.observe.account import SERVER_PARTS, WORKER_PARTS
from paceline.wire import messages as m

OPTIONS = (
    Option(("--watch",), "print the table again every second until the job ends"),
    Option(("--json",), "print one JSON object per table"),
)
_TIMEOUT_S = 30.0
_HEAD = (
    "role",
    "rank",
    "host",
    "state",
    "round",
    "pace",
    "step",
    "waits for",
    "sent",
    "received",
    "memory",
    "last heard",
)


def run(name: str, words: Sequence[str]) -> int:
    """Print the state of a job.

    Raises:
        UsageError: more than one job is named.
        LaunchError: there is no such job, or its scheduler does not answer.
    """
    usage = "paceline status [JOB] [options]"
    job, options = Parser(name, OPTIONS, usage, "Print the state of a running job.").parse_named(words)
    if len(job) > 1:
        raise UsageError(f"one job at a time, not {' and '.join(job)}")
    record = runtime.find(job[0] if job else None)
    while True:
        status = ask(record)
        rows, says = rows_of(status), [*([record.choice] if record.choice else []), *status.auto]
        print(_as_json(record, rows, status) if options.json else shown(rows, says, status.verdicts), flush=True)
        if not options.watch:
            return 0
        time.sleep(1.0)
        record = next((one for one in runtime.jobs() if one.id == record.id), record)
        if not record.is_alive:
            return 0
        print("" if options.json or not sys.stdout.isatty() else "\x1b[2J\x1b[H", end="")


def rows_of(status: m.Status) -> list[dict[str, Any]]:
    """Return a mapping per process."""
    slowest = min((one.round for member, one in zip(status.members, status.states, strict=True) if _works(member, one)),
                  default=0)  # fmt: skip
    return [_row(member, one, status, slowest) for member, one in zip(status.members, status.states, strict=True)]


def ask(record: runtime.JobRecord) -> m.Status:
    """Ask the scheduler of a job for its members' state.

    Raises:
        LaunchError: there is none yet, or it does not answer in time.
    """
    if not record.scheduler:
        raise LaunchError(f"job {record.id} has no scheduler (yet); only its launcher knows how it does")
    from paceline.net import Security
    from paceline.net.client import Client
    from paceline.net.sockets import SocketHub

    settings = Settings(scheduler=record.scheduler, job_key=record.key, insecure=not record.key)
    client = Client(SocketHub(Security.of(settings)))
    try:
        channel = client.connect(record.scheduler, "worker", "scheduler", f"at {record.scheduler}")
        call = client.ask(channel, m.AskStatus(), "asking for the status")
        if client.wait([call], _TIMEOUT_S) is not None:
            raise LaunchError(f"the scheduler of job {record.id} at {record.scheduler} did not answer")
        assert isinstance(call.body, m.Status)
        return call.body
    finally:
        client.close()


def _as_json(record: runtime.JobRecord, rows: Sequence[dict[str, Any]], status: m.Status) -> str:
    choice = {"choice": record.choice} if record.choice else {}
    revised = {"revised": list(status.auto)} if status.auto else {}
    slow = {"slow": list(status.verdicts)} if status.verdicts else {}
    figures = {"figures": _figures(status.figures)} if status.figures else {}
    return json.dumps({"job": record.id, "processes": rows, **choice, **revised, **slow, **figures})


def _figures(last: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    return {name: {"step": step, "value": value} for name, (step, value) in last.items()}


def shown(rows: Sequence[dict[str, Any]], auto: Sequence[str] = (), verdicts: Sequence[str] = ()) -> str:
    """Return the table of a job, the workers that are slow, and what ``dist_auto`` does there and why.

    Args:
        rows: a mapping per process.
        auto: the choice at the start, since then, and advice.
        verdicts: a sentence per slow worker.
    """
    cells = [
        (
            row["role"],
            str(row["rank"]),
            row["host"],
            row["state"],
            str(row["round"]) if row["role"] == "worker" else "",
            f"{row['pace']:.1f}/s" if row["pace"] else "",
            f"{1000 * row['step_s']:.0f} ms" if row["step_s"] else "",
            ", ".join(map(str, row["waits_for"])),
            quantity(row["sent"]),
            quantity(row["received"]),
            quantity(row["memory"]),
            f"{row['silent_s']:.1f} s ago",
        )
        for row in rows
    ]
    return "\n".join([table(_HEAD, cells), *verdicts, *_gone(rows), *(f"dist_auto: {text}" for text in auto)])


def _gone(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each worker that has left while others train on."""
    workers = [row for row in rows if row["role"] == "worker"]
    first = max((row["round"] for row in workers if row["state"] == "live"), default=0)
    return [
        f"worker {row['rank']} on {row['host']} left the job after round {row['round']}; others are in round {first}"
        for row in workers
        if row["state"] == "left" and row["round"] < first
    ]


def _works(member: m.Member, state: m.MemberState) -> bool:
    return member.role == "worker" and state.phase in ("live", "silent")


def _row(member: m.Member, state: m.MemberState, status: m.Status, slowest: int) -> dict[str, Any]:
    waits = [int(rank) for rank in state.waits_for.split()]
    if _works(member, state) and not waits and state.round > slowest:
        waits = [
            one.rank
            for one, other in zip(status.members, status.states, strict=True)
            if _works(one, other) and other.round == slowest
        ]
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
        "figures": _figures(state.figures),
    }


def _parts(role: str, recent: Sequence[m.Window]) -> dict[str, float]:
    """Return the share of each part in the time of a process, of late; and a worker's samples per second."""
    if not recent:
        return {}
    (last,) = recent
    names, whole = WORKER_PARTS if role == "worker" else SERVER_PARTS, sum(last.parts) or 1
    shares = {name: round(part / whole, 4) for name, part in zip(names, last.parts, strict=False)}
    return shares | ({"samples_per_s": round(1e6 * last.samples / whole, 3)} if role == "worker" else {})
