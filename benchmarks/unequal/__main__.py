"""Modes of synchronising on twelve real workers of three speeds, and the simulator beside them.

    python -m benchmarks.unequal --short

Every job that was run is a line of ``--runs``; what is in it is not run again, so a benchmark that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

from benchmarks.unequal import columns, picture
from benchmarks.unequal.accept import checks, compared, measured_service, simulated_column, simulated_same_rate
from benchmarks.unequal.columns import Rates, Setup
from benchmarks.unequal.losing import sooner
from benchmarks.unequal.real import Runner
from benchmarks.unequal.report import Findings, as_json, markdown
from benchmarks.unequal.trial import Ledger

#: A few minutes: one seed, the simulator's rates as they are.
SHORT = Setup(seeds=(0,), same_lr=0.2, same_s=150.0, tuned_s=30.0, simulated_s=60.0, confirms=False)


def measure(setup: Setup, runner: Runner) -> Findings:
    """Run everything; says what it does."""
    _say("rates in the simulator")
    found = columns.simulated_rates(setup)
    _say(f"rates {found}; now against their neighbours on real processes")
    rates = columns.confirmed(setup, runner, found)
    _say(f"each mode at its own rate {rates}")
    own = columns.own_rates(setup, runner, rates)
    _say(f"all modes at {setup.same_lr}")
    same = columns.same_rate(setup, runner)
    of_mass = columns.equal_mass(own, rates)
    _say(f"equal step mass {of_mass}")
    equal = columns.of_equal_mass(setup, runner, of_mass)
    all_rates = {mode: Rates(found[mode], rates[mode], of_mass[mode]) for mode in rates}
    _say("the simulator with measured service times, and machines on which lock step wins")
    service = measured_service(own)
    simulated = simulated_column(setup, all_rates, service)
    return Findings(
        setup.same_lr, all_rates, same, own, equal, simulated, service,
        checks(same, own, simulated_same_rate(setup, service)), compared(own, simulated),
        sooner(setup, service), [f"{trial}: {outcome.overruns:.1%}" for trial, outcome in runner.rejected],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one seed, rates not confirmed")
    parser.add_argument("--workers-per-class", type=int, default=4)
    parser.add_argument("--side-by-side", type=int, default=4, help="jobs at the same time")
    parser.add_argument("--runs", type=Path, default=Path("unequal-runs.jsonl"))
    parser.add_argument("--report", type=Path, default=Path("unequal.md"), help="with a picture beside it")
    args = parser.parse_args()
    begun = time.monotonic()
    setup = _setup(args.short, args.workers_per_class)
    found = measure(setup, Runner(Ledger(args.runs), args.side_by_side))
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    minutes = (time.monotonic() - begun) / 60
    what = f"{date.today().isoformat()}, {machine}, {len(setup.seeds)} seeds, {minutes:.0f} minutes"
    image = args.report.with_suffix(".png")
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(markdown(found, what, image.name))
    picture.write(found, image)
    print(args.report.read_text())
    print(json.dumps(as_json(found)))


def _setup(short: bool, per_class: int) -> Setup:
    return replace(SHORT if short else Setup(), per_class=per_class)


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


if __name__ == "__main__":
    main()
