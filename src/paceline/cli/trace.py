"""``paceline trace``: a trace of the next rounds of a running job, for Perfetto and other tools."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.cli.options import Option, Parser, UsageError, usage_errors
from paceline.cli.running import SCHEDULER, asking, find
from paceline.errors import LaunchError
from paceline.observe.chrome import ChromeTrace, TraceEvent, merged, window
from paceline.observe.event_order import EventOrder, MemberKey, aligned
from paceline.observe.events import Source, parse
from paceline.observe.table import plural
from paceline.observe.trace_file import TraceFile
from paceline.wire import messages as m

OPTIONS = (
    Option(("--rounds",), "whole rounds of every worker (default: 5)", "ROUNDS", int, least=1, most=10_000),
    Option(("-o", "--output"), "file to write (default: trace.json)", "FILE"),
    Option(("--timeout",), "seconds for the rounds (default: 60)", "SECONDS", float, positive=True, most=3600),
    Option(("--merge",), "a file of torch.profiler of one of the workers, to be part of the trace", "FILE"),
    Option(("--per-rank",), "also write a file for each worker into this folder, for HolisticTraceAnalysis", "DIR"),
    SCHEDULER,
)

DESCRIPTION = """\
Record the next rounds of a running job, and write them for https://ui.perfetto.dev, chrome://tracing and other tools:
the parts of each worker's steps, the servers' merges and updates, and the way of each push. The job goes on."""

_POLL_S = 0.1


def run(name: str, words: Sequence[str]) -> int:
    """Write a trace.

    Raises:
        UsageError: the command line is wrong.
        LaunchError: there is no such job, it has no events, or its scheduler does not answer.
    """
    usage = "paceline trace [JOB] [options]"
    job, options = Parser(name, OPTIONS, usage, DESCRIPTION).parse_job(words)
    profile = _profile(options.merge) if options.merge else None
    record = find(job, options.scheduler)
    if not record.scheduler:
        raise LaunchError(f"job {record.id} has no scheduler (yet), so nobody can collect its events")
    rounds, path = options.rounds or 5, Path(options.output or "trace.json")
    with asking(record, "a trace") as ask:
        parts, says = _collect(ask, rounds, options.timeout or 60.0)
    if not any(one.events.records for one in parts):
        raise LaunchError(f"job {record.id} has sent no events; is PACELINE_RECORDER=0 set? {says}".rstrip())
    order, since = assembled(parts)
    trace = ChromeTrace(order, *window(order, since, rounds))
    events = list(trace.events())
    with usage_errors(f"--merge {options.merge}: "):
        _write(path, trace.head(record.id), [*events, *(merged(trace, profile) if profile else [])])
    for role, rank in trace.pids if options.per_rank else ():
        if role == "worker":
            own = [one for one in events if one["pid"] == trace.pids[role, rank]]
            _write(Path(options.per_rank, f"rank-{rank}.pt.trace.json"), trace.head(record.id, rank), own)
    print(_summary(path, trace, says))
    return 0


def _profile(path: str) -> Mapping[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--merge {path}: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--merge {path}: it is no file of torch.profiler")
    return found


def _write(path: Path, head: Mapping[str, Any], events: Sequence[TraceEvent]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = TraceFile(path, head)
        file.write(events)
        file.close()
    except OSError as error:
        raise LaunchError(f"the trace cannot be written: {error}") from error


def _collect(ask: Callable[[m.Request], m.Body], rounds: int, timeout_s: float) -> tuple[list[m.TracePart], str]:
    """Return the events of all processes, and why there are less than wanted. The scheduler keeps the deadline."""
    number, parts = secrets.randbits(62) + 1, list[m.TracePart]()
    while True:
        body = ask(m.AskTrace(number, rounds, timeout_s, len(parts)))
        assert isinstance(body, m.TraceIs)
        parts += body.parts
        if body.is_over:
            return parts, body.says
        if not body.parts:
            time.sleep(_POLL_S)


def assembled(parts: Sequence[m.TracePart]) -> tuple[EventOrder, float]:
    """Return the processes behind the parts of a trace, and the time from which on all of them have sent events."""
    by_member: dict[MemberKey, list[m.TracePart]] = {}
    for one in parts:
        by_member.setdefault((one.role, one.rank), []).append(one)
    processes, since = [], 0.0
    for (role, rank), ones in by_member.items():
        best = min((one.events for one in ones), key=lambda events: events.error)
        source = Source(role, rank, ones[0].host, ones[0].pid, best.unix, best.offset, best.error)
        events = [event for one in ones for event in parse(one.events.records)]
        processes.append(aligned(source, events, lost=sum(one.events.lost for one in ones)))
        since = max(since, best.since + best.offset)
    return EventOrder(processes), since


def _summary(path: Path, trace: ChromeTrace, says: str) -> str:
    processes = trace.order.processes.values()
    error, lost = max(one.source.error for one in processes), sum(one.lost for one in processes)
    return "; ".join(
        [
            f"{path}: {1e3 * (trace.end - trace.begin):.0f} ms of {plural(len(processes), 'process', 'processes')}",
            f"the ways of {plural(len(trace.flows), 'push', 'pushes')}",
            f"clocks aligned to {1e6 * error:.0f} us",
            *([f"{lost} events were lost"] if lost else []),
            *([says] if says else []),
            "open it at https://ui.perfetto.dev",
        ]
    )
