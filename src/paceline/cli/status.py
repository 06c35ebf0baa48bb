"""``paceline status``: the members of a job, their progress, and those it waits for; and ``paceline jobs``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from paceline.cli.options import Option, Parser
from paceline.cli.running import ask
from paceline.launch import runtime
from paceline.launch.supervise.panel import obeys_codes
from paceline.membership.log import sentence
from paceline.observe.rows import figures_of, rows_of
from paceline.observe.table import duration, quantity, table
from paceline.wire import messages as m

OPTIONS = (
    Option(("--watch",), "print the table again every second until the job ends"),
    Option(("--json",), "print one JSON object per table"),
)
_HEAD = (
    "role", "rank", "host", "state", "round", "pace", "step", "waits for", "sent", "received", "memory", "last heard",
)  # fmt: skip


def run(name: str, words: Sequence[str]) -> int:
    """Print the state of a job."""
    usage = "paceline status [JOB] [options]"
    job, options = Parser(name, OPTIONS, usage, "Print the state of a running job.").parse_job(words)
    record = runtime.find(job)
    while True:
        status = ask(record)
        rows, says = rows_of(status), [*([record.choice] if record.choice else []), *status.auto]
        told = [f"{duration(one.ago_s)} ago: {sentence(one)}" for one in status.changes if one.kind != "starts"]
        text = "\n".join([shown(rows, says, [*status.verdicts, *status.weighing]), *told])
        print(_as_json(record, rows, status) if options.json else text, flush=True)
        if not options.watch:
            return 0
        time.sleep(1.0)
        record = next((one for one in runtime.jobs() if one.id == record.id), record)
        if not record.is_alive:
            return 0
        print("" if options.json or not (sys.stdout.isatty() and obeys_codes(os.environ)) else "\x1b[2J\x1b[H", end="")


def _as_json(record: runtime.JobRecord, rows: Sequence[dict[str, Any]], status: m.Status) -> str:
    choice = {"choice": record.choice} if record.choice else {}
    revised = {"revised": list(status.auto)} if status.auto else {}
    slow = {"slow": list(status.verdicts)} if status.verdicts else {}
    weighing = {"weighing": list(status.weighing)} if status.weighing else {}
    figures = {"figures": figures_of(status.figures)} if status.figures else {}
    changes = {"changes": list(map(_fields, status.changes))}
    more = {**choice, **revised, **slow, **weighing, **figures, **changes}
    return json.dumps({"job": record.id, "processes": rows, **more})


def _fields(change: m.Change) -> dict[str, Any]:
    found = {name: getattr(change, name) for name in ("generation", "kind", "workers", "round", "why")}
    return {"ago_s": round(change.ago_s, 3), "text": sentence(change), **found}


def shown(rows: Sequence[dict[str, Any]], auto: Sequence[str] = (), lines: Sequence[str] = ()) -> str:
    """Return the table of a job, lines about its workers, and what ``dist_auto`` does there and why."""
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
    return "\n".join([table(_HEAD, cells), *lines, *_gone(rows), *(f"dist_auto: {text}" for text in auto)])


def _gone(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each worker that has left while others train on."""
    workers = [row for row in rows if row["role"] == "worker"]
    first = max((row["round"] for row in workers if row["state"] == "live"), default=0)
    return [
        f"worker {row['rank']} on {row['host']} left the job after round {row['round']}; others are in round {first}"
        for row in workers
        if row["state"] == "left" and row["round"] < first
    ]


def run_jobs(name: str, words: Sequence[str]) -> int:
    """Print the jobs of this user and return 0."""
    Parser(name, (), "paceline jobs", "List your jobs whose launcher runs on this machine.").parse(words)
    rows = [
        (
            record.id,
            str(record.pid),
            time.strftime("%H:%M:%S", time.localtime(record.started)),
            f"{record.workers}+{record.servers}",
            ",".join(record.hosts),
            record.command,
        )
        for record in runtime.jobs()
    ]
    print(table(("job", "pid", "started", "n+s", "hosts", "command"), rows) if rows else "no job of yours runs here")
    return 0
