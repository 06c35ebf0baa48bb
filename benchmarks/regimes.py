"""Time to an accuracy in every mode on simulated clusters that differ in what makes them slow, and that of dist_auto.

Every mode gets the learning rate that suits it best: from a guess in steps of 2, then of the square root of 2, downhill
in the geometric mean of the times over some seeds. It is then timed on other seeds, which the search for rates has not
seen. Modes that are far from the best on two seeds keep the rate that these have found. ``dist_auto`` measures the
simulated machines as a real job does, and trains as it chooses; how long it measures is printed beside.

    python -m benchmarks.regimes --seeds 8 --fresh 16 --json regimes.json
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.teacher import Teacher
from paceline.consistency import policy_of
from paceline.hetero import Choice, Speed, choose
from paceline.sim import SimulatedCluster, SimulatedTraining, SimulatedWorker, simulate
from paceline.sim.simulation import measure

BATCH = 32
TARGET = 0.77
EVALUATE_S = 4.0
#: Simulated seconds after which a mode has not reached the target.
LIMIT_S = 4000.0
#: How much longer than the best fixed mode dist_auto may take.
MARGIN = 1.10
#: Seeds on which all modes are compared first. Only those within 1.4 times the best are then compared on all.
SCREENING, NEAR = 2, 1.4
#: The first of the seeds that times are reported of.
FRESH = 100


@dataclass(frozen=True)
class Regime:
    """A cluster, and how its data lie."""

    cluster: SimulatedCluster
    groups: tuple[tuple[int, ...], ...]
    """Groups that a user would give by speed."""
    skew: float = 0.0


def _machines(*seconds: float) -> tuple[SimulatedWorker, ...]:
    """Workers whose step takes so long, a fifth of it whatever the batch."""
    return tuple(SimulatedWorker(Speed(0.2 * one, 0.8 * one / BATCH)) for one in seconds)


def _regimes() -> dict[str, Regime]:
    classes = [1.0] * 4 + [2.0] * 4 + [4.0] * 4
    by_class = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    base = Regime(SimulatedCluster(_machines(*classes), jitter=0.1), by_class)
    everybody = (tuple(range(12)),)
    rate = sum(1 / one for one in classes)  # pushes per second without waits

    def changed(**more: float) -> Regime:
        return replace(base, cluster=replace(base.cluster, **more))

    mild = [1.0] * 4 + [4 / 3] * 4 + [2.0] * 4
    many = [1.0] * 12 + [2.0] * 12 + [4.0] * 12
    thirds = tuple(tuple(range(start, start + 12)) for start in (0, 12, 24))
    return {
        "base 1:2:4": base,
        "mild 2:3:4": Regime(SimulatedCluster(_machines(*mild), jitter=0.1), by_class),
        "homogeneous": Regime(SimulatedCluster(_machines(*[1.0] * 12), jitter=0.1), everybody),
        "one 8x straggler": Regime(
            SimulatedCluster(_machines(*[1.0] * 11, 8.0), jitter=0.1), (tuple(range(11)), (11,))
        ),
        "5 % of steps 8x": changed(spike_probability=0.05, spike_factor=8.0),
        "server link 35 %": changed(bandwidth=1.0, model_bytes=0.35 / rate),
        "server link 140 %": changed(bandwidth=1.0, model_bytes=1.4 / rate),
        "server optimizer 200 %": changed(update_s=2.0 / rate),
        "wrong groups": replace(base, groups=((0, 5, 10, 3), (4, 1, 9, 8), (2, 6, 7, 11))),
        "label-skewed shards": replace(base, skew=0.8),
        "36 workers": Regime(SimulatedCluster(_machines(*many), jitter=0.1), thirds),
    }


REGIMES = _regimes()


@dataclass(frozen=True)
class Mode:
    """A plan without a learning rate, and a first guess of that."""

    plan: SimulatedTraining
    guess: float


def fixed_modes(regime: Regime) -> dict[str, Mode]:
    """Return every mode that a user could choose, by name; the first is BSP."""
    count = len(regime.cluster.workers)

    def mode(guess: float, store_type: str, shares: Any = "equal", **options: Any) -> Mode:
        policy = policy_of(store_type, num_workers=count, **options)
        return Mode(SimulatedTraining(policy, shares, BATCH, regime.skew), guess)

    groups: dict[str, Any] = {"groups": regime.groups}
    plain: dict[str, Any] = {**groups, "weighting": "none"}
    modes = {
        "BSP": mode(1.6, "dist_sync"),
        "LB-BSP": mode(1.6, "dist_sync", "measured"),
        "ASP": mode(0.2, "dist_async"),
        "ASP 1/Y": mode(1.6, "dist_async", weighting="inverse"),
        "ASP +pool": mode(0.2, "dist_async", "pool"),
        "SSP 3": mode(0.2, "dist_ssync"),
        "GSP": mode(0.8, "dist_gsync", **plain),
        "GSP 1/Y": mode(1.6, "dist_gsync", **groups),
        "GSP 1/Y +shards": mode(1.6, "dist_gsync", "data", **groups),
        "GSP +pool": mode(0.8, "dist_gsync", "pool", **plain),
    }
    for part in (6, 4, 3, 2):
        modes[f"K=N/{part} +pool"] = mode(0.4, "dist_ksync", "pool", first=count // part)
    return modes


@functools.cache
def problem(seed: int) -> Teacher:
    """Return what the workers learn."""
    return Teacher(seed=seed)


def seconds_to_target(
    cluster: SimulatedCluster, plan: SimulatedTraining, limits: Sequence[float], first: int = 0
) -> list[float]:
    """Return the simulated time to the target for each seed; infinite, for all, if one is not there in time.

    Args:
        cluster: the machines.
        plan: how they train.
        limits: longest simulated time, by seed.
        first: seed.
    """
    found = []
    for seed, limit_s in enumerate(limits, first):
        one = replace(plan, seconds=limit_s, target=TARGET, evaluate_s=EVALUATE_S, seed=seed)
        with np.errstate(over="ignore", invalid="ignore"):  # rates that are too large
            seconds = simulate(cluster, one, problem(seed)).target_s
        if seconds is None:
            return [math.inf] * len(limits)
        found.append(seconds)
    return found


def _mean(times: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, times)) / len(times)) if math.isfinite(max(times)) else math.inf


def tuned(cluster: SimulatedCluster, mode: Mode, seeds: int, *, coarse: bool = False) -> tuple[float, float]:
    """Return (seconds, learning rate) of the best rate near the guess of a mode; coarse: in steps of 2 only."""
    found: dict[int, list[float]] = {}  # by half powers of 2 times the guess
    best = 0

    def at(halves: int) -> float:
        if halves not in found:
            # A rate that is three times as slow as the best one so far is not looked at to its end.
            limits = [min(LIMIT_S, 3 * one) for one in found.get(best, [LIMIT_S] * seeds)]
            found[halves] = seconds_to_target(cluster, replace(mode.plan, lr=mode.guess * 2 ** (halves / 2)), limits)
        return _mean(found[halves])

    at(best)
    for step in (-2, 2) if coarse else (-2, 2, -1, 1):
        while at(best + step) < at(best) or (at(best) == math.inf and -12 < best + step < 0):
            best += step
    return at(best), mode.guess * 2 ** (best / 2)


def timed(cluster: SimulatedCluster, mode: Mode, rate: float, fresh: int) -> float:
    """Return the seconds of a mode at a rate, on so many seeds that the search for rates has not seen."""
    return _mean(seconds_to_target(cluster, replace(mode.plan, lr=rate), [LIMIT_S] * fresh, FRESH))


def auto_mode(regime: Regime, seed: int = 0) -> tuple[Choice, Mode, float]:
    """Return what dist_auto chooses for a regime, as a mode, and how long it measures in seconds."""
    measured, seconds = measure(regime.cluster, BATCH, seed=seed)
    choice = choose(measured)
    policy, count = choice.policy, len(regime.cluster.workers)
    # Rates are those of samples: as many times the rate of an update as it has parts of a batch of all workers.
    first = 0.4 * count / max(1, policy.first)
    guess = {"all": 1.6, "each": 0.2 * count, "first": first}.get(policy.merge, 0.8 * len(policy.groups))
    return choice, Mode(SimulatedTraining(policy, choice.shares, BATCH, regime.skew), guess), seconds  # type: ignore[arg-type]


@dataclass(frozen=True)
class Row:
    """A regime's result: simulated seconds to the target."""

    regime: str
    fixed: dict[str, float]
    rates: dict[str, float]
    auto: float
    choice: str
    measuring_s: float

    @property
    def best(self) -> str:
        """The fastest fixed mode."""
        return min(self.fixed, key=lambda name: self.fixed[name])

    @property
    def ratio(self) -> float:
        """The time of dist_auto over that of the fastest fixed mode."""
        return self.auto / self.fixed[self.best]


def run(name: str, seeds: int, fresh: int, modes: Sequence[str] = ()) -> Row:
    """Measure a regime.

    Args:
        name: of the regime.
        seeds: how many, of data, noise and first weights, to find rates with.
        fresh: how many to time with.
        modes: names of the fixed modes; by default all.
    """
    regime = REGIMES[name]
    every = {one: mode for one, mode in fixed_modes(regime).items() if not modes or one in modes}
    rough = {one: tuned(regime.cluster, mode, SCREENING, coarse=True) for one, mode in every.items()}
    near = NEAR * min(seconds for seconds, _ in rough.values())
    rates = {one: rate for one, (_, rate) in rough.items()}
    for one in [one for one, (seconds, _) in rough.items() if seconds <= near]:
        _, rates[one] = tuned(regime.cluster, replace(every[one], guess=rates[one]), seeds)
    fixed = {one: timed(regime.cluster, mode, rates[one], fresh) for one, mode in every.items()}
    choice, mode, measuring_s = auto_mode(regime)
    _, rates["dist_auto"] = tuned(regime.cluster, mode, seeds)
    auto = timed(regime.cluster, mode, rates["dist_auto"], fresh)
    return Row(name, fixed, rates, auto, choice.sentence, measuring_s)


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown: speed-up over the first mode."""
    names = list(rows[0].fixed)
    lines = [
        f"| regime ({names[0]}) | {' | '.join(names[1:])} | dist_auto | over the best |",
        "|---" * (len(names) + 2) + "|",
    ]
    for row in rows:
        first = row.fixed[names[0]]
        cells = [f"{first / one:.2f}" for one in [*list(row.fixed.values())[1:], row.auto]]
        lines.append(f"| {row.regime} ({first:.0f} s) | {' | '.join(cells)} | {row.ratio:.2f} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Run regimes and print the table; returns 1 if dist_auto is too slow in one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", nargs="*", default=list(REGIMES), choices=list(REGIMES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=8, help="that rates are found with")
    parser.add_argument("--fresh", type=int, default=16, help="seeds that times are reported of")
    parser.add_argument("--json", type=Path, help="add results to this file, and print all that it has")
    options = parser.parse_args(words)
    done = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for name in options.regimes:
        row = run(name, options.seeds, options.fresh)
        done[name] = row.__dict__
        print(f"{name}: {row.choice}; {row.measuring_s:.0f} s to measure", flush=True)
        if options.json:
            options.json.write_text(json.dumps(done, indent=1))
    rows = [Row(**done[name]) for name in REGIMES if name in done]
    print(table(rows))
    slow = [row.regime for row in rows if row.ratio > MARGIN]
    if slow:
        print(f"dist_auto takes more than {MARGIN:.2f} times as long as the best fixed mode in: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
