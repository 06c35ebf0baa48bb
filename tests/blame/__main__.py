"""``python -m tests.blame``: many jobs with a random fault each; tables, then one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.blame.trial import PHASES, Outcome, Trial, draw, run
from tests.busy.load import busy

Done = dict[int, tuple[Trial, Outcome]]
"""By seed."""


def main() -> int:
    """Run the trials; the exit code is 0 if at least the wanted share went well, and nothing hung or was left."""
    options = _arguments()
    done = _read(options.resume)
    with busy(options.load):
        _run_missing(options, done)
    wanted = {seed: done[seed] for seed in _seeds(options) if seed in done}
    _print_tables(list(wanted.values()))
    summary = _summary(list(wanted.values()))
    print(json.dumps(summary | {"seed": options.seed, "load": options.load, "parallel": options.parallel}))
    return 0 if summary["share"] >= options.share and not summary["hung"] and not summary["left_running"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.blame", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="how many jobs (default: 200)")
    parser.add_argument("--now", type=int, help="start at most so many of them now; with --resume (default: all)")
    parser.add_argument("--resume", type=Path, help="file with a line per job that is done; these are not run again")
    parser.add_argument("-n", "--workers", type=int, default=3, help="of each job (default: 3)")
    parser.add_argument("-s", "--servers", type=int, default=2, help="of each job (default: 2)")
    parser.add_argument("--parallel", type=int, default=2, help="jobs at a time (default: 2)")
    parser.add_argument("--load", type=int, default=0, help="processes that only use up time (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the first job; the others follow (default: 0)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no job after this time")
    parser.add_argument("--share", type=float, default=0.99, help="of the jobs that must go well (default: 0.99)")
    parser.add_argument("--keep", type=Path, help="folder for the output of jobs that did not go well")
    return parser.parse_args()


def _seeds(options: argparse.Namespace) -> range:
    return range(options.seed, options.seed + options.jobs)


def _read(path: Path | None) -> Done:
    """Return the jobs that a file lists; a line that was not written to its end counts as not done."""
    done: Done = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        done[found["trial"]["seed"]] = Trial(**found["trial"]), Outcome(**found["outcome"])
    return done


def _run_missing(options: argparse.Namespace, done: Done) -> None:
    """Run the jobs that are not done, and write each down at once."""
    until = time.monotonic() + options.minutes * 60
    lock = threading.Lock()

    def one(seed: int) -> None:
        if time.monotonic() > until:
            return
        trial = draw(seed, options.workers, options.servers)
        outcome = run(trial, Path(folder, str(seed)))
        if outcome.problem and not (outcome.missed and outcome.kind == "wrong"):
            print(f"{trial}: {outcome.problem}", flush=True)
            _keep(options.keep, trial, outcome)
        with lock:
            done[seed] = trial, outcome
            if options.resume is not None:
                with options.resume.open("a") as file:
                    file.write(json.dumps({"trial": asdict(trial), "outcome": asdict(outcome) | {"output": ""}}) + "\n")

    missing = [seed for seed in _seeds(options) if seed not in done][: options.now]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(one, missing))


def _keep(folder: Path | None, trial: Trial, outcome: Outcome) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{trial.seed}.txt").write_text(f"{trial}\n{outcome.problem}\n{outcome.output}")


def _print_tables(done: list[tuple[Trial, Outcome]]) -> None:
    kinds = Table("culprit", "fault", "jobs", "right", "too late", "slowest end", title="random faults")
    for (role, fault), outcomes in _grouped(done, lambda trial: (trial.role, trial.fault)).items():
        hit = [one for one in outcomes if not one.missed]
        slowest = max((one.seconds for one in hit), default=0.0)
        kinds.add_row(
            role, fault, str(len(outcomes)), _right(outcomes), str(len(outcomes) - len(hit)), f"{slowest:.1f} s"
        )
    phases = Table("culprit", "fault", *PHASES, title="right, by the phase in which the fault came")
    for (role, fault), _ in _grouped(done, lambda trial: (trial.role, trial.fault)).items():
        of_phase = _grouped(
            [one for one in done if (one[0].role, one[0].fault) == (role, fault)], lambda trial: (trial.phase, "")
        )
        phases.add_row(role, fault, *(_right(of_phase.get((phase, ""), [])) for phase in PHASES))
    console = Console()
    console.print(kinds)
    console.print(phases)


def _grouped(
    done: Iterable[tuple[Trial, Outcome]], key: Callable[[Trial], tuple[str, str]]
) -> dict[tuple[str, str], list[Outcome]]:
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for trial, outcome in done:
        groups.setdefault(key(trial), []).append(outcome)
    return dict(sorted(groups.items()))


def _right(outcomes: list[Outcome]) -> str:
    hit = [one for one in outcomes if not one.missed]
    return f"{sum(not one.problem for one in hit)}/{len(hit)}" if hit else "-"


def _summary(done: list[tuple[Trial, Outcome]]) -> dict[str, float]:
    hit = [outcome for _, outcome in done if not outcome.missed]
    kinds = Counter(one.kind for one in hit)
    all_kinds = Counter(outcome.kind for _, outcome in done)  # nothing may hang or stay, whether a fault came or not
    return {
        "jobs": len(hit),
        "too_late": len(done) - len(hit),
        "right": kinds[""],
        "share": kinds[""] / max(1, len(hit)),
        "wrong": kinds["wrong"],
        "hung": all_kinds["hung"],
        "left_running": all_kinds["left running"],
        "slowest_end_s": round(max((one.seconds for one in hit), default=0.0), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
