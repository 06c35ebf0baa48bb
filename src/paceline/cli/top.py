"""``paceline top``: a live picture of a running job in the terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.cli.options import Option, Parser, UsageError
from paceline.cli.status import ask, rows_of
from paceline.cli.table import duration, quantity, table
from paceline.config import variable
from paceline.launch import runtime
from paceline.observe.account import SERVER_PARTS, WORKER_PARTS
from paceline.wire import messages as m

OPTIONS = (
    Option(("--interval",), "seconds between two pictures (default: 1)", "SECONDS", float, positive=True),
    Option(("--once",), "print one picture and end"),
    Option(("--scheduler",), "address of a scheduler on another machine; needs PACELINE_JOB_KEY", "ADDRESS"),
)

#: Letters of the parts in bars.
LETTERS: Mapping[str, str] = {
    "data": "d", "compute": "C", "device": "v", "encode": "e", "send": "s", "wait": ".", "copy": "p", "update": "u",
    "gc": "g", "other": "o", "receive": ".", "merge": "m", "apply": "a", "rest": "r",
}  # fmt: skip

#: Narrowest terminal that still gets a bar, and the widest bar.
_LEAST_COLUMNS, _LONGEST_BAR = 40, 60

_CLEAR = "\x1b[H\x1b[J"


def run(name: str, words: Sequence[str]) -> int:
    """Show a job until it ends.

    Raises:
        UsageError: more than one job is named.
        LaunchError: there is no such job, or its scheduler does not answer.
    """
    usage = "paceline top [JOB] [options]"
    about = "Watch a running job. Ctrl-C ends this, not the job."
    job, options = Parser(name, OPTIONS, usage, about).parse_named(words)
    if len(job) > 1:
        raise UsageError(f"one job at a time, not {' and '.join(job)}")
    record = _elsewhere(options.scheduler) if options.scheduler else runtime.find(job[0] if job else None)
    live = sys.stdout.isatty() and not options.once
    try:
        while True:
            text = picture(ask(record), record, time.time(), shutil.get_terminal_size().columns)
            print(f"{_CLEAR if live else ''}{text}", flush=True)
            if options.once:
                return 0
            time.sleep(options.interval or 1.0)
            if not options.scheduler and not record.is_alive:
                return 0
    except KeyboardInterrupt:
        return 0


def _elsewhere(scheduler: str) -> runtime.JobRecord:
    """Return the record of a job of another machine."""
    key = os.environ.get(variable("job_key"), "")
    return runtime.JobRecord(scheduler, 0, "", time.time(), "", (), 0, 0, scheduler, key)


def picture(status: m.Status, record: runtime.JobRecord, now: float, columns: int) -> str:
    """Return the picture of a job as lines that are no longer than the terminal is wide.

    Args:
        status: the scheduler's answer.
        record: the job.
        now: seconds since 1970.
        columns: width of the terminal.
    """
    rows = rows_of(status)
    workers = [row for row in rows if row["role"] == "worker"]
    servers = [row for row in rows if row["role"] == "server"]
    workers.sort(key=lambda row: (-row["step_s"], row["rank"]))
    rate = sum(row["parts"].get("samples_per_s", 0.0) for row in workers if row["state"] == "live")
    first = max((row["round"] for row in workers), default=0)
    head = f"job {record.id}  {duration(now - record.started)}  round {first:,}  {rate:,.0f} samples/s"
    lines = [head, record.command, "", *_with_bars(workers, _worker_cells, WORKER_PARTS, columns)]
    lines += ["", *_with_bars(servers, _server_cells, SERVER_PARTS, columns)] if servers else []
    legend = "  ".join(f"{LETTERS[part]} {part}" for part in dict.fromkeys((*WORKER_PARTS, *SERVER_PARTS)))
    for text in ("", legend, *status.verdicts):
        lines += textwrap.wrap(text, max(columns, 20)) or [""]
    return "\n".join(line[:columns].rstrip() for line in lines)


def _worker_cells(row: dict[str, Any]) -> tuple[str, ...]:
    rate = row["parts"].get("samples_per_s", 0.0)
    return (
        f"worker {row['rank']}", row["host"], row["state"], str(row["round"]), f"{1000 * row['step_s']:.0f} ms",
        f"{rate:,.0f}/s", ",".join(map(str, row["waits_for"])),
    )  # fmt: skip


def _server_cells(row: dict[str, Any]) -> tuple[str, ...]:
    busy = 1 - row["parts"].get("receive", 1.0)
    return (
        f"server {row['rank']}", row["host"], row["state"], f"{busy:.0%}", quantity(row["received"]),
        quantity(row["sent"]), quantity(row["memory"]),
    )  # fmt: skip


_HEADS = {
    _worker_cells: ("worker", "host", "state", "round", "step", "samples", "waits for"),
    _server_cells: ("server", "host", "state", "busy", "received", "sent", "memory"),
}


def _with_bars(rows: Sequence[dict[str, Any]], cells: Any, parts: Sequence[str], columns: int) -> list[str]:
    """Return a table whose lines end with a bar, where the terminal is wide enough."""
    lines = table(_HEADS[cells], [cells(row) for row in rows]).split("\n")
    width = max(map(len, lines)) + 2
    length = min(columns - width - 1, _LONGEST_BAR)
    if columns < _LEAST_COLUMNS or length < 10:
        return lines
    bars = [bar(row["parts"], parts, length) for row in rows]
    return [lines[0], *(f"{line:{width}}{one}" for line, one in zip(lines[1:], bars, strict=True))]


def bar(shares: Mapping[str, float], parts: Sequence[str], length: int) -> str:
    """Return the parts of a step as so many letters, each part with its share of them."""
    text, done = "", 0.0
    for part in parts:
        done += shares.get(part, 0.0)
        text += LETTERS[part] * (round(done * length) - len(text))
    return text
