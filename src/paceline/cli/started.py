"""Commands that the launcher starts: ``paceline run`` inside an allocation, ``paceline agent`` on each host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from paceline.cli.options import Parser, UsageError, usage_errors
from paceline.errors import LaunchError
from paceline.launch import Machine, backend
from paceline.launch.job_spec import from_json
from paceline.launch.remote.agent import main


def run_inside(name: str, words: Sequence[str]) -> int:
    """Run the job of an allocation of Slurm, as the batch script says, and return its exit code."""
    from paceline.launch.engines.slurm import SPEC_VARIABLE, options_of  # agents do not need it

    Parser(
        name,
        (),
        "paceline run",
        f"""\
Run a job inside an allocation of Slurm. paceline launch --launcher slurm submits a script that calls it; the job comes
in the variable {SPEC_VARIABLE}.""",
    ).parse(words)
    text = os.environ.pop(SPEC_VARIABLE, "")
    if not text or "SLURM_JOB_ID" not in os.environ:
        raise UsageError("paceline run works inside an allocation only; use: paceline launch --launcher slurm")
    chosen = backend("slurm")
    with usage_errors():
        spec = from_json(text)
        lead = max(1.0, options_of(spec).signal - 5.0)
        spec = replace(spec, graces=replace(spec.graces, interrupt_s=lead))
        request = chosen.plan(spec, Machine.here())
    chosen.check(request)
    return chosen.submit(request).wait()


def run_agent(name: str, words: Sequence[str]) -> int:
    """Serve a launcher until it hangs up.

    Raises:
        LaunchError: stdin is not that of a launcher.
    """
    Parser(
        name,
        (),
        "paceline agent",
        """\
Start and watch the processes of one host, for a launcher that talks to it on stdin and stdout. It ends everything it
has started when its stdin ends. paceline launch starts it on each host.""",
    ).parse(words)
    try:
        return main()
    except (ValueError, PermissionError) as error:  # a file, or what somebody types
        raise LaunchError(
            f"stdin is not that of a launcher: {error}; paceline launch starts the agent of each host"
        ) from error
