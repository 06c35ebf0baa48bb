"""``python -m tests.soak``: jobs that train for long; a table, a picture, then one line of JSON.

Each worker of a job uses another transport, and takes steps of every way to train in turn: pushes and pulls of a store
(also with a codec that keeps residuals), rows, DistributedOptimizer (also with a codec), gluon's Trainer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.soak.job import Outcome, Trial
from tests.soak.picture import draw, listed
from tests.soak.repetitions import left_by
from tests.soak.worker import TRANSPORTS

MODES = ("dist_sync", "dist_async", "dist_ssync", "dist_gsync", "dist_ksync")
FRONTS = ("raw", "raw+codec", "rows", "optimizer", "optimizer+codec", "trainer")

#: Growth of memory that is too much.
LIMIT_MIB_PER_MINUTE = 1.0


def main() -> int:
    """Run a job per mode; the exit code is 0 if nothing grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="types of stores (default: all)")
    parser.add_argument("--front", nargs="+", default=FRONTS, help=f"ways to train (default: {' '.join(FRONTS)})")
    parser.add_argument(
        "--transport", nargs="+", choices=list(TRANSPORTS), default=list(TRANSPORTS),
        help="of the workers: one worker for each (default: all)",
    )  # fmt: skip
    parser.add_argument("-s", "--servers", type=int, default=2, help="of each job (default: 2)")
    parser.add_argument("--seconds", type=float, default=600, help="of each job, the warm-up included (default: 600)")
    parser.add_argument("--warm-up", type=float, default=60, help="seconds that are not judged (default: 60)")
    parser.add_argument("--steps", type=int, default=5000, help="that are judged at least (default: 5000)")
    parser.add_argument(
        "--repetitions", type=int, default=1000, help="of what a program may repeat: stores, optimizers, reconnections "
        "and so on; 0: none (default: 1000)",
    )  # fmt: skip
    parser.add_argument("--picture", type=Path, default=Path("soak.svg"), help="where to draw (default: soak.svg)")
    options = parser.parse_args()
    outcomes: dict[str, Mapping[str, Outcome]] = {}
    report: dict[str, dict[str, object]] = {}
    console = Console(width=160)
    for mode in options.mode:
        began = time.monotonic()
        trial = Trial(
            [mode], options.front, options.transport, options.servers,
            warm_up=(min(500, options.steps), options.warm_up),
            measured=(options.steps, options.seconds - options.warm_up),
        )  # fmt: skip
        outcomes[mode] = trial.run()
        report[mode] = {"steps": trial.steps, "seconds": round(time.monotonic() - began)}
        report[mode] |= {"processes": {name: _figures(one) for name, one in outcomes[mode].items()}}
        console.print(_table(mode, trial.steps, outcomes[mode]))
    if outcomes:
        draw(outcomes, options.picture)
    problems = [f"{mode}, {name}: {text}" for mode, name, one in listed(outcomes) for text in problems_of(one)]
    problems += _left(options.repetitions) if options.repetitions else []
    for problem in problems:
        console.print(f"[red]{problem}[/red]")
    worst = max((one.growth.mib_per_minute for _, _, one in listed(outcomes)), default=0.0)
    print(json.dumps({"problems": problems, "worst_mib_per_minute": round(worst, 3), "modes": report}))
    return 1 if problems else 0


def _left(times: int) -> list[str]:
    """Repeat what a program may repeat; returns what that left."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            f"{times} times {use}, {who}: {name} grew by {more}"
            for use, left in left_by(times, Path(folder))
            for who, what in left.items()
            for name, more in what.items()
        ]


def problems_of(one: Outcome) -> list[str]:
    """Return what grew too much in a process."""
    grown = one.growth
    found = [f"{name} grew by {more}" for name, more in one.grown.items()]
    if grown.mib_per_minute >= LIMIT_MIB_PER_MINUTE:
        found.append(f"memory grew by {grown.mib_per_minute:.2f} MiB per minute")
    if grown.descriptors:
        found.append(f"{grown.descriptors} more file descriptors")
    if grown.threads:
        found.append(f"{grown.threads} more threads")
    return found


def _figures(one: Outcome) -> dict[str, float]:
    last = one.samples[-1]
    return {
        "mib": round(one.growth.at_end_mib, 1),
        "mib_per_minute": round(one.growth.mib_per_minute, 3),
        "bytes_per_step": round(one.bytes_per_step, 1),
        "descriptors": last.descriptors,
        "threads": last.threads,
    }


def _table(mode: str, steps: int, outcomes: Mapping[str, Outcome]) -> Table:
    table = Table(
        "process", "MiB", "MiB / min", "bytes / step", "descriptors", "threads", "grown", title=f"{mode}, {steps} steps"
    )
    for name, one in outcomes.items():
        last = one.samples[-1]
        grown = one.growth
        table.add_row(
            name, f"{grown.at_end_mib:.1f}", f"{grown.mib_per_minute:+.3f}", f"{one.bytes_per_step:+.1f}",
            f"{last.descriptors} (+{grown.descriptors})", f"{last.threads} (+{grown.threads})",
            ", ".join(f"{what} +{more}" for what, more in sorted(one.grown.items())[:4]) or "-",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
