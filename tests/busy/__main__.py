"""``python -m tests.busy``: on a busy machine good jobs end with 0, and failures name the right process."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.blame.trial import Outcome, Trial, draw
from tests.blame.trial import run as run_trial
from tests.busy.jobs import Kind, Result, kinds, run
from tests.busy.load import Load
from tests.clusters.ssh import SshHosts, why_no_ssh

#: Faults that are failures: the others end a job with 0, or may.
_FAULTS = frozenset({"SIGKILL", "SIGSTOP", "raise", "exit3", "os._exit3"})

#: How many times as long as on an idle machine a failure may take.
PATIENCE = 10.0


def main() -> int:
    """Run the jobs; the exit code is 0 if every good one ended with 0 and every fault was blamed on the right one."""
    options = _arguments()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-busy-")))
        with_ssh = not why_no_ssh() and not options.no_ssh
        cluster = stack.enter_context(SshHosts(2)) if with_ssh else None
        load = stack.enter_context(Load(options.load))
        pool = stack.enter_context(ThreadPoolExecutor(options.parallel))
        turns = itertools.cycle(kinds(folder, with_ssh))
        good = [pool.submit(_good, next(turns), folder / f"good-{number}", cluster) for number in range(options.jobs)]
        bad = [pool.submit(_bad, trial, folder / f"bad-{trial.seed}") for trial in _trials(options)]
        for one in track(as_completed(good + bad), "jobs", len(good + bad), console=Console(stderr=True)):
            one.result()
        results, outcomes = [one.result() for one in good], [one.result() for one in bad]
    _print_tables(results, outcomes)
    summary = _summary(results, outcomes) | {"load": options.load, "mean_load": round(load.mean, 1)}
    print(json.dumps(summary | {"parallel": options.parallel, "minutes": round((time.monotonic() - began) / 60, 1)}))
    return 0 if summary["good"] == summary["jobs"] and summary["right"] == summary["faults"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.busy", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100, help="good jobs (default: 100)")
    parser.add_argument("--faults", type=int, default=50, help="jobs with a failure (default: 50)")
    parser.add_argument("--load", type=int, default=20 * (os.cpu_count() or 1), help="threads that run (20 a core)")
    parser.add_argument("--parallel", type=int, default=6, help="jobs at a time (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="of the first failure (default: 0)")
    parser.add_argument("--no-ssh", action="store_true", help="leave out jobs over ssh")
    return parser.parse_args()


def _trials(options: argparse.Namespace) -> list[Trial]:
    drawn = (draw(seed) for seed in itertools.count(options.seed))
    return list(itertools.islice((trial for trial in drawn if trial.fault in _FAULTS), options.faults))


def _good(kind: Kind, folder: Path, cluster: SshHosts | None) -> Result:
    result = run(kind, folder, cluster)
    if result.code != 0:
        print(f"{result.kind}: exit code {result.code}\n{result.output[-3000:]}", flush=True)
    return result


def _bad(trial: Trial, folder: Path) -> tuple[Trial, Outcome]:
    outcome = run_trial(trial, folder, PATIENCE)
    while outcome.missed:  # the fault came after the end: nobody was to blame
        folder = folder.with_name(f"{folder.name}-again")
        outcome = run_trial(trial, folder, PATIENCE)
    if outcome.problem:
        print(f"{trial}: {outcome.problem}\n{outcome.output[-3000:]}", flush=True)
    return trial, outcome


def _print_tables(results: list[Result], outcomes: list[tuple[Trial, Outcome]]) -> None:
    console = Console()
    good = Table("job", "jobs", "ended with 0", "median", "slowest", title="good jobs")
    for name in dict.fromkeys(one.kind for one in results):
        those = [one for one in results if one.kind == name]
        seconds = [one.seconds for one in those]
        zeros = sum(one.code == 0 for one in those)
        good.add_row(name, str(len(those)), str(zeros), f"{statistics.median(seconds):.0f} s", f"{max(seconds):.0f} s")
    console.print(good)
    bad = Table("culprit", "fault", "jobs", "right", "slowest end", title="failures")
    for role, fault in sorted({(trial.role, trial.fault) for trial, _ in outcomes}):
        found = [outcome for trial, outcome in outcomes if (trial.role, trial.fault) == (role, fault)]
        right = sum(not one.problem for one in found)
        bad.add_row(role, fault, str(len(found)), str(right), f"{max(one.seconds for one in found):.0f} s")
    console.print(bad)


def _summary(results: list[Result], outcomes: list[tuple[Trial, Outcome]]) -> dict[str, float]:
    return {
        "jobs": len(results),
        "good": sum(one.code == 0 for one in results),
        "faults": len(outcomes),
        "right": sum(not one.problem for _, one in outcomes),
        "slowest_job_s": round(max((one.seconds for one in results), default=0.0), 1),
        "slowest_end_s": round(max((one.seconds for _, one in outcomes), default=0.0), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
