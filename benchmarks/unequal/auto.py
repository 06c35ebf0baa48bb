"""What dist_auto chooses on real processes, beside the modes that a user could have taken.

The workers are those of :mod:`benchmarks.unequal`: they compute true gradients, and take for each batch as long as
their machine would. A short job measures them as ``paceline launch --groups auto`` does. Every mode then trains at its
own rate.

    python -m benchmarks.unequal.auto --kinds straggler
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.unequal import columns
from benchmarks.unequal.columns import Setup
from benchmarks.unequal.modes import ALL_MODES, KINDS, Kind, Machines
from benchmarks.unequal.real import Runner, measured
from benchmarks.unequal.trial import Ledger, middle_s, sooner
from paceline.hetero import Choice, choose

#: How many times as long as the best mode dist_auto may take.
MARGIN = 1.10

_STALE = ("ASP", "ASP 1/Y", "ASP +pool", "ASP 1/Y +pool", "K-sync")
_GROUPS = ("GSP 1/Y +shares", "GSP +shares")
#: Modes that can be the best on each kind of machines.
CANDIDATES: dict[Kind, tuple[str, ...]] = {
    "classes": ("BSP", "LB-BSP", *_STALE, *_GROUPS),
    "alike": ("BSP", *_STALE),
    "straggler": ("LB-BSP", *_STALE, *_GROUPS),
}


@dataclass(frozen=True)
class Row:
    """What was chosen on one kind of machines, and seconds to the target by mode."""

    kind: Kind
    chosen: str
    sentence: str
    seconds: dict[str, float]
    sooner: dict[str, float]
    """How many times as soon as the chosen mode each mode is there: the median over seeds."""

    @property
    def best(self) -> str:
        """The fastest mode."""
        return max(self.sooner, key=lambda mode: self.sooner[mode])

    @property
    def line(self) -> str:
        """The row as Markdown."""
        others = ", ".join(f"{mode} {seconds:.1f}" for mode, seconds in self.seconds.items() if mode != self.chosen)
        times = f"{self.seconds[self.chosen]:.1f} | {self.sooner[self.best]:.2f} ({self.best})"
        return f"| {self.kind} | {self.chosen} | {times} | {others} |"


def mode_of(choice: Choice) -> str:
    """Return the benchmark's name of what was chosen.

    The rate of a sample is that of an update here, divided by the number of workers, and each mode has its own rate.

    Raises:
        LookupError: it is none of the benchmark's modes.
    """
    policy = choice.policy
    for name, mode in ALL_MODES.items():
        like = (mode.store_type, mode.shares) == (choice.store_type, choice.shares)
        if like and mode.options.get("weighting", "none") == policy.weighting:
            return name
    raise LookupError(f"dist_auto chose {choice.words}, which is none of {', '.join(ALL_MODES)}")


def compare(kind: Kind, runner: Runner) -> Row:
    """Measure machines, choose, and train in every mode."""
    choice = choose(measured(Machines(kind=kind)))
    chosen = mode_of(choice)
    setup = Setup(modes=tuple(dict.fromkeys((*CANDIDATES[kind], chosen))), kind=kind)
    rates = columns.confirmed(setup, runner, columns.simulated_rates(setup))
    own = columns.own_rates(setup, runner, rates)
    seconds = {mode: middle_s(outcomes) for mode, outcomes in own.items()}
    faster = {mode: sooner(outcomes, own[chosen]) for mode, outcomes in own.items()}
    return Row(kind, chosen, choice.sentence, seconds, faster)


def main(words: Sequence[str] | None = None) -> int:
    """Compare and print; returns 1 if dist_auto is too slow somewhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--side-by-side", type=int, default=4, help="jobs at the same time")
    parser.add_argument("--runs", type=Path, default=Path("unequal-runs.jsonl"))
    options = parser.parse_args(words)
    runner = Runner(Ledger(options.runs), options.side_by_side)
    rows = []
    for kind in options.kinds:
        rows.append(compare(kind, runner))
        print(rows[-1].sentence, flush=True)
    print("| machines | chosen | s | best over it | others, s |", "|---" * 5 + "|", sep="\n")
    print(*(row.line for row in rows), sep="\n")
    print(json.dumps([row.__dict__ for row in rows]))
    return int(any(row.sooner[row.best] > MARGIN for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
