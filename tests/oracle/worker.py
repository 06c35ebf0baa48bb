"""What runs in the workers: scripts, one after the other in one process."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import torch

from paceline.testing import listen, tell
from paceline.testing.faults import Chance, asked_for
from tests.oracle.registry import Script, as_lists, named
from tests.oracle.run import Run

#: How long a worker whose script was refused stays, so that its end is not what the others notice.
STAY_S = 60.0


def run_scripts(names: list[str], workers: int, kvstore: str, options: dict[str, Any], devices: list[str]) -> None:
    """Run scripts and tell what each returned, up to the first that fails; worker i has device i, or the last one."""
    rank = int(os.environ["PACELINE_RANK"])
    pause, device = pause_of(rank), devices[min(rank, len(devices) - 1)]
    same_arithmetic()
    for script in named(names):
        run = Run(workers, rank, joined=False, kvstore=kvstore, options=options, pause=pause, device=device)
        outcome = outcome_of(script, run)
        tell(outcome)
        if "error" in outcome:
            listen(STAY_S)
            return


def same_arithmetic() -> None:
    """Switch off products of 10 bits on GPUs, which are no fault of a job."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def outcome_of(script: Script, run: Run) -> dict[str, Any]:
    """Run one script; returns its values, or its error and in which step that came, counted from 0."""
    try:
        return {"script": script.name, "values": as_lists(script.run(run))}
    except Exception as error:  # noqa: BLE001 - the test judges it
        trace = "".join(traceback.format_exception(error)[-3:])
        text = f"{type(error).__name__}: {error}"
        return {"script": script.name, "error": text, "step": run.steps_made - 1, "trace": trace}


def pause_of(rank: int) -> Callable[[], None] | None:
    """Return how gradient hooks take their time in a job with faults."""
    faults = asked_for()
    return Chance(faults, f"hooks of worker {rank}").pause if faults is not None else None
