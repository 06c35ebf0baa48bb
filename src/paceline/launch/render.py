"""The job plan as text."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from paceline.launch.plan import JobPlan, Late, ProcessSpec, Value

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def describe(plan: JobPlan, commands: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> str:
    """Return the plan as text: one block per process. Secrets are masked, other late values are described.

    Before them come the commands that the launcher runs, and the variables that processes on other hosts inherit.
    """
    blocks = [_summary(plan)]
    if commands:
        blocks.append("\n".join(["the launcher runs", *(f"  {command}" for command in commands)]))
    if environ:
        blocks.append("\n".join(["every process inherits", *_variables(environ)]))
    blocks += [*(_block(process) for process in plan), *(f"note: {note}" for note in plan.notes)]
    return "\n\n".join(blocks) + "\n"


def _summary(plan: JobPlan) -> str:
    counts = Counter(process.role for process in plan)
    return f"job {plan.job_id}: " + ", ".join(f"{n} {role}{'s' if n > 1 else ''}" for role, n in counts.items())


def _block(process: ProcessSpec) -> str:
    group = f", group {process.group}" if process.group not in ("", "all") else ""
    head = f"{process.member} on {process.host}{group}"
    return "\n".join([head, f"  {shlex.join(process.argv)}", *_variables(process.env)])


def _variables(env: Mapping[str, Value]) -> list[str]:
    return [f"    {name}={_text(name, value)}" for name, value in env.items()]


def _text(name: str, value: Value) -> str:
    if isinstance(value, Late):
        return value.value
    return "***" if _SECRET.search(name) else shlex.quote(value)
