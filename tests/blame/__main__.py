"""``python -m tests.blame``: many jobs with a random fault each; a table, then one line of JSON."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.blame.trial import Outcome, Trial, draw, run

_BUSY = [sys.executable, "-c", "while True: pass"]


def main() -> int:
    """Run the trials; the exit code is 0 if at least the wanted share went well, and nothing hung or was left."""
    parser = argparse.ArgumentParser(prog="python -m tests.blame", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="how many jobs (default: 200)")
    parser.add_argument("-n", "--workers", type=int, default=3, help="of each job (default: 3)")
    parser.add_argument("-s", "--servers", type=int, default=2, help="of each job (default: 2)")
    parser.add_argument("--parallel", type=int, default=2, help="jobs at a time (default: 2)")
    parser.add_argument("--load", type=int, default=0, help="processes that only use up time (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the first job; the others follow (default: 0)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no job after this time")
    parser.add_argument("--share", type=float, default=0.99, help="of the jobs that must go well (default: 0.99)")
    parser.add_argument("--keep", type=Path, help="folder for the output of jobs that did not go well")
    options = parser.parse_args()
    busy = [subprocess.Popen(_BUSY) for _ in range(options.load)]
    try:
        done = _run_all(options)
    finally:
        for process in busy:
            process.kill()
    _print_table(done)
    summary = _summary(done)
    print(json.dumps(summary | {"load": options.load, "parallel": options.parallel}))
    return 0 if summary["share"] >= options.share and not summary["hung"] and not summary["left_running"] else 1


def _run_all(options: argparse.Namespace) -> list[tuple[Trial, Outcome]]:
    until = time.monotonic() + options.minutes * 60
    done: list[tuple[Trial, Outcome]] = []

    def one(seed: int) -> None:
        if time.monotonic() > until:
            return
        trial = draw(seed, options.workers, options.servers)
        outcome = run(trial, Path(folder, str(seed)))
        done.append((trial, outcome))
        if outcome.problem and not outcome.missed:
            print(f"{trial}: {outcome.problem}", flush=True)
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                (options.keep / f"{seed}.txt").write_text(f"{trial}\n{outcome.problem}\n{outcome.output}")

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(one, range(options.seed, options.seed + options.jobs)))
    return done


def _print_table(done: list[tuple[Trial, Outcome]]) -> None:
    table = Table("culprit", "fault", "jobs", "right", "too late", "slowest end", title="random faults")
    kinds = sorted({(trial.role, trial.fault) for trial, _ in done})
    for kind in kinds:
        outcomes = [outcome for trial, outcome in done if (trial.role, trial.fault) == kind]
        hit = [one for one in outcomes if not one.missed]
        right = sum(not one.problem for one in hit)
        slowest = max((one.seconds for one in hit), default=0.0)
        table.add_row(
            *kind, str(len(outcomes)), f"{right}/{len(hit)}", str(len(outcomes) - len(hit)), f"{slowest:.1f} s"
        )
    Console().print(table)


def _summary(done: list[tuple[Trial, Outcome]]) -> dict[str, float]:
    hit = [outcome for _, outcome in done if not outcome.missed]
    problems = Counter(one.problem.split(" ")[0] for one in hit if one.problem)
    right = sum(not one.problem for one in hit)
    return {
        "jobs": len(hit),
        "too_late": len(done) - len(hit),
        "right": right,
        "share": right / max(1, len(hit)),
        "hung": problems["no"],
        "left_running": problems["left"],
        "slowest_end_s": round(max((one.seconds for one in hit), default=0.0), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
