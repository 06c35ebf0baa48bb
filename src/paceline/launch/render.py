"""The job plan as text."""

from __future__ import annotations

import shlex
from collections import Counter

from paceline.launch.plan import Late, Plan, ProcessSpec, Value


def describe(plan: Plan) -> str:
    """Return the plan as text: one block per process. The job's key is masked, other late values are described."""
    blocks = [_summary(plan), *(_block(process) for process in plan), *(f"note: {note}" for note in plan.notes)]
    return "\n\n".join(blocks) + "\n"


def _summary(plan: Plan) -> str:
    counts = Counter(process.role for process in plan)
    return f"job {plan.job_id}: " + ", ".join(f"{n} {role}{'s' if n > 1 else ''}" for role, n in counts.items())


def _block(process: ProcessSpec) -> str:
    variables = [f"    {name}={_text(value)}" for name, value in process.env.items()]
    return "\n".join([f"{process.member} on {process.host}", f"  {shlex.join(process.argv)}", *variables])


def _text(value: Value) -> str:
    return value.value if isinstance(value, Late) else shlex.quote(value)
