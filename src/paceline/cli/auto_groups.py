"""``paceline launch --groups auto``: measures the workers in a short job first, and groups them by speed.

The groups follow the speeds while the job runs (:mod:`paceline.membership.drift`).
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.errors import LaunchError
from paceline.hetero import Groups, group_by_speed
from paceline.hetero.files import groups_text, parse_speeds
from paceline.launch import JobSpec

#: Rounds between two checks whether the groups still fit: noise of speeds leads to no false alarm at this interval.
REGROUP_ROUNDS = 5

#: Rounds that are measured: more than :class:`~paceline.hetero.SpeedMeter` needs for a median that noise does not move.
ROUNDS = 20


def with_measured_groups(spec: JobSpec, run: Callable[[JobSpec], int]) -> JobSpec | int:
    """Return the job with groups that were measured; or the exit code of the measurement, if that failed.

    Args:
        spec: the job; its script may end before :data:`ROUNDS` rounds only if that is an error.
        run: runs a job, and returns its exit code.

    Raises:
        LaunchError: nothing was measured, or scikit-learn is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "speeds"
        settings = {"profile": str(path), "profile_rounds": str(ROUNDS), "groups": "auto"}
        code = run(replace(spec, job_id=secrets.token_hex(4), max_restarts=0, settings={**spec.settings, **settings}))
        if code != 0:
            return code
        if not path.exists():
            raise LaunchError(
                "no speeds were measured: worker 0 runs on another machine, or the script ends before "
                f"{ROUNDS} rounds; use paceline profile, paceline group and --groups FILE"
            )
        speeds = parse_speeds(path.read_text())
    try:
        groups = group_by_speed(list(speeds.values()))
    except ImportError as error:
        raise LaunchError(str(error)) from error
    print(f"groups by measured speed:\n{groups_text(groups, speeds)}", end="", flush=True)
    regroup = {"regroup_rounds": str(REGROUP_ROUNDS)}
    return replace(spec, settings={**regroup, **spec.settings, "groups": _by_rank(groups)})


def _by_rank(groups: Groups) -> str:
    """Return groups as a setting: ``0 1; 2;``."""
    return " ".join(f"{' '.join(map(str, ranks))};" for ranks in groups)
