"""``paceline status``: the members of a job, their progress, and those it waits for; and ``paceline jobs``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence

from paceline.cli.options import Option, Parser
from paceline.cli.running import ask
from paceline.launch import runtime
from paceline.launch.supervise.panel import obeys_codes
from paceline.observe.job_view import JobView, MemberView
from paceline.observe.table import quantity, table

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
        view = ask(record)
        print(
            json.dumps(view.as_json(record.id, record.choice)) if options.json else shown(view, record.choice),
            flush=True,
        )
        if not options.watch:
            return 0
        time.sleep(1.0)
        record = next((one for one in runtime.jobs() if one.id == record.id), record)
        if not record.is_alive:
            return 0
        print("" if options.json or not (sys.stdout.isatty() and obeys_codes(os.environ)) else "\x1b[2J\x1b[H", end="")


def shown(view: JobView, choice: str = "") -> str:
    """Return the table of a job, lines about its workers, what ``dist_auto`` does and why, and the last changes."""
    status = view.status
    auto = [f"dist_auto: {text}" for text in ([choice] if choice else []) + status.auto]
    lines = [*status.verdicts, *status.weighing, *view.gone, *auto, *view.changes("starts")]
    return "\n".join([table(_HEAD, [_cells(one) for one in view.members]), *lines])


def _cells(one: MemberView) -> tuple[str, ...]:
    member, state = one.member, one.state
    return (
        member.role,
        str(member.rank),
        member.host,
        state.phase,
        str(state.round) if one.is_worker else "",
        f"{state.pace:.1f}/s" if round(state.pace, 3) else "",
        f"{1000 * state.step_s:.0f} ms" if state.step_s else "",
        ", ".join(map(str, one.waits_for)),
        quantity(state.sent),
        quantity(state.received),
        quantity(state.memory),
        f"{state.silent_s:.1f} s ago",
    )


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
