"""Runs trials as jobs of real processes: a scheduler, a server, and a process per worker."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.unequal.modes import ALL_MODES, BATCH, JITTER, Machines
from benchmarks.unequal.trial import EVALUATE_S, TARGET, Ledger, Outcome, Trial
from benchmarks.unequal.worker import measure, train
from paceline.hetero import Measured, WorkerRound, measured_of
from paceline.sim.problem import Digits
from paceline.testing import LocalJob

#: A job in which more batches than this overran their deadlines says nothing about the modes.
MOST_OVERRUNS = 0.02
_ENDING_S = 60.0


class Runner:
    """Runs trials, several side by side, and keeps what they gave.

    Args:
        ledger: trials that were run.
        side_by_side: jobs that run at the same time; their workers mostly sleep.
    """

    def __init__(self, ledger: Ledger, side_by_side: int) -> None:
        self._ledger, self._side_by_side = ledger, side_by_side
        self.rejected: list[tuple[Trial, Outcome]] = []
        """Jobs whose deadlines were overrun, each time that they were run."""

    def run(self, trials: Sequence[Trial]) -> list[Outcome]:
        """Return what the trials gave, in order; one that was run before is not run again.

        One whose deadlines were overrun is run once more, alone. If they are again, its outcome has reached nothing and
        does not count.
        """
        refused = {trial for trial, _ in self.rejected}
        missing = [one for one in dict.fromkeys(trials) if self._ledger.get(one) is None and one not in refused]
        with ThreadPoolExecutor(self._side_by_side) as pool:
            for trial, outcome in zip(missing, pool.map(run_once, missing), strict=True):
                self._keep(trial, outcome)
        for trial in missing:
            if self._ledger.get(trial) is None:
                self._keep(trial, run_once(trial))
        return [self._ledger.get(one) or _NOTHING for one in trials]

    def _keep(self, trial: Trial, outcome: Outcome) -> None:
        if outcome.overruns > MOST_OVERRUNS:
            print(f"rejected: {outcome.overruns:.1%} of batches overran their deadline, {trial}", flush=True)
            self.rejected.append((trial, outcome))
        else:
            self._ledger.add(trial, outcome)


_NOTHING = Outcome(0.0, 0.0, 0.0, 0.0, 0.0, ((0.0, 0.0),), overruns=1.0)


def run_once(trial: Trial) -> Outcome:
    """Run a job and return what it gave."""
    machines, mode = trial.machines, ALL_MODES[trial.mode]
    with tempfile.TemporaryDirectory(prefix="paceline-unequal-") as directory:
        data, flag = Path(directory, "data.npz"), Path(directory, "flag")
        np.savez(data, **_arrays(Digits(seed=trial.seed)))  # type: ignore[arg-type]  # its stub has one option
        flag.write_bytes(b"\0")
        with LocalJob(machines.count, 1, check_rules=False) as job:
            by_speed = [1 / speed.seconds(BATCH) for speed in machines.speeds]
            task = asdict(trial) | {
                "store_type": mode.store_type,
                "options": mode.options_on(machines),
                "shares": mode.shares,
                "weights": by_speed if mode.shares == "data" else [1.0] * machines.count,
                "speeds": _speeds(machines),
                "jitter": JITTER,
                "batch": BATCH,
                "target": TARGET if trial.to_target else None,
                "evaluate_s": EVALUATE_S,
                "data": str(data),
                "flag": str(flag),
                "server": job.servers[0].pid,
            }
            return _outcome(trial, job.run(train, task, timeout_s=trial.seconds + _ENDING_S))


def measured(machines: Machines) -> Measured:
    """Return what a short job of real processes shows of the machines."""
    with LocalJob(machines.count, 1, check_rules=False) as job:
        steps = job.run(measure, {"speeds": _speeds(machines), "jitter": JITTER, "batch": BATCH})
    return measured_of([[WorkerRound(*one) for one in of_worker] for of_worker in steps], BATCH)


def _speeds(machines: Machines) -> list[tuple[float, float]]:
    return [(speed.fixed_s, speed.per_sample_s) for speed in machines.speeds]


def _arrays(problem: Digits) -> dict[str, np.ndarray[Any, Any]]:
    """Return the data and the first weights as a worker's network takes them."""
    w1, b1, w2, b2 = problem.network.parts(problem.initial())
    floats = {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "images": problem.images, "test_images": problem.test_images}
    labels = {"labels": problem.labels, "test_labels": problem.test_labels}
    return {name: one.astype(np.float32) for name, one in floats.items()} | labels


def _outcome(trial: Trial, seen: Sequence[dict[str, Any]]) -> Outcome:
    watch = seen[0]
    seconds, stats = watch["seconds"], watch["stats"]
    batches = sum(one["batches"] for one in seen)
    return Outcome(
        seconds=seconds,
        batches_per_s=sum(one["batches"] / one["seconds"] for one in seen),
        samples_per_s=sum(one["samples"] / one["seconds"] for one in seen),
        staleness=stats["staleness"],
        mass_per_s=stats["step_mass"] / trial.lr / seconds,
        curve=tuple((float(when), float(accuracy)) for when, accuracy in watch["curve"]),
        overruns=sum(one["overruns"] for one in seen) / max(1, batches),
        gradient_ms=1e3 * max(one["gradient_s"] for one in seen),
        exchange_ms=1e3 * watch["exchange_s"],
        fetch_ms=1e3 * fmean(one["fetch_s"] for one in seen),
        server_ms=1e3 * watch["server_cpu_s"] / max(1, batches),
        busy_cores=watch["busy_cores"],
    )
