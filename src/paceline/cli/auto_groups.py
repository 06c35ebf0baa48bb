"""``paceline launch --groups auto``: measures the workers in a short job first, and chooses by the result.

The job itself gets groups by speed, for ``dist_gsync``, and a way to synchronise, for ``dist_auto``. Both follow the
speeds while it runs (:mod:`paceline.membership.following`).
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from paceline.consistency import groups_line
from paceline.errors import LaunchError
from paceline.hetero import choose, group_by_speed
from paceline.hetero.files import choice_text, groups_text, measured_text, parse_speeds, parse_steps
from paceline.hetero.measured import ROUNDS
from paceline.launch import JobSpec

#: Rounds between two checks whether the groups still fit: noise of speeds leads to no false alarm at this interval.
REGROUP_ROUNDS = 5


def with_measured_groups(spec: JobSpec, run: Callable[[JobSpec], int]) -> JobSpec | int:
    """Return the job with groups and a choice by measurement; or the exit code of a measurement that failed.

    Raises:
        LaunchError: there are no measurements, or scikit-learn is not installed.
    """
    if find_spec("sklearn") is None:  # said now, not after minutes of measuring
        raise LaunchError("groups by speed need scikit-learn: pip install 'paceline[hetero]'")
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path, steps = Path(folder) / "speeds", Path(folder) / "steps"
        settings = {"profile": str(path), "profile_steps": str(steps), "profile_rounds": str(ROUNDS)}
        settings |= {"groups": "auto", "server_speeds": "measured"}
        code = run(replace(spec, job_id=secrets.token_hex(4), max_restarts=0, settings={**spec.settings, **settings}))
        if code != 0:
            return code
        if not path.exists():
            raise LaunchError(
                "no speeds were measured: worker 0 runs on another machine, or the script ends before "
                f"{ROUNDS} rounds; use paceline profile, paceline group and --groups FILE"
            )
        speeds, steps_of_all = parse_speeds(path.read_text()), steps.read_text()
    try:
        groups = group_by_speed(list(speeds.values()))
        measured = parse_steps(steps_of_all)
        choice = choose(measured, groups)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    regroup = {"regroup_rounds": str(REGROUP_ROUNDS)}
    print(f"groups by measured speed:\n{groups_text(groups, speeds)}dist_auto: {choice.sentence}", flush=True)
    found = {"groups": groups_line(groups), "choice": choice_text(choice), "measured": measured_text(measured)}
    return replace(spec, settings={**regroup, **spec.settings, **found})
