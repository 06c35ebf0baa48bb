"""``paceline run``: the part of a job that runs inside an allocation, after ``paceline launch`` has submitted it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from paceline.cli.options import Parser, UsageError
from paceline.launch import Machine, backend
from paceline.launch.engines.slurm import SPEC_VARIABLE, lead_s
from paceline.launch.job_spec import from_json

_DESCRIPTION = """\
Run a job inside an allocation of Slurm. paceline launch --launcher slurm submits a script that calls it; the job comes
in the variable PACELINE_SPEC."""


def run(name: str, words: Sequence[str]) -> int:
    """Run the job and return its exit code.

    Raises:
        UsageError: there is no job in the environment.
        LaunchError: the job cannot be started.
    """
    Parser(name, (), "paceline run", _DESCRIPTION).parse(words)
    text = os.environ.pop(SPEC_VARIABLE, "")
    if not text or "SLURM_JOB_ID" not in os.environ:
        raise UsageError("paceline run works inside an allocation only; use: paceline launch --launcher slurm")
    chosen = backend("slurm")
    try:
        spec = from_json(text)
        lead = max(1.0, lead_s(spec.options) - 5.0)
        spec = replace(spec, graces=replace(spec.graces, interrupt_s=lead))
        request = chosen.plan(spec, Machine.here())
    except ValueError as error:
        raise UsageError(str(error)) from error
    return chosen.submit(request).wait()
