"""Samples per second of unlike workers, against what their own times allow.

    python -m benchmarks.unequal.shares --repeats 3

A worker's gradients are complete when those of its machine would be: after a fixed time and a time per sample. It
sleeps until then, so six workers fit on two cores. Each job trains two epochs: in the second one, worker 0 takes twice
as long. The beginning of each epoch is left out; it has the steps in which shares follow. ``--every 2`` takes every
second worker: fewer share this machine's cores, which shows how much of the rest is their processor time.

- *Allowed*: samples/s that the workers' own times allow: all finish together, nothing is exchanged, and samples can be
  cut. With equal batches: those of the slowest worker.
- *Whole*: samples/s that they allow if samples cannot be cut.
- *Longest*: the longest computation of a step, in ms: what the shares make of the own times.
- *Beyond*: what a step takes in addition: exchange, update, next batch. All workers share this machine's cores in it,
  so it is an upper bound for workers with cores of their own, and it grows with the machine's load.
- *Answer*: from the last complete gradient until the first worker has the update. *Queue*: from then until the last
  worker has it: with cores of their own, workers have it at nearly the same time.
- ``given`` has the best shares of the first epoch, and exchanges no speeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from paceline.hetero import Speed, fastest_split, step_seconds

#: Seconds of a batch, by worker, and the part of it that does not depend on its samples.
SECONDS, FIXED, BATCH = (0.06, 0.06, 0.12, 0.12, 0.24, 0.24), 0.2, 16
#: How many times as long each worker takes, by epoch.
SLOWER = ((1.0,) * len(SECONDS), (2.0, *(1.0,) * (len(SECONDS) - 1)))
#: Part of an epoch that is not measured.
SETTLING = 0.4
WORKER = Path(__file__).parents[1] / "workers" / "shares_worker.py"
TIMEOUT_S = 600.0

Seen: TypeAlias = tuple[float, float, int, float]
"""A step of a worker: begin and end, samples, seconds of computation."""


@dataclass(frozen=True)
class Way:
    """A way to give work to the workers."""

    store_type: str
    shares: str
    """``given``: the best ones of the first epoch."""
    options: tuple[str, ...] = ()
    """Of ``paceline launch``."""


@dataclass(frozen=True)
class Rate:
    """What the settled part of an epoch gave."""

    samples_per_s: float
    longest_ms: float
    beyond_ms: float
    answer_ms: float
    queue_ms: float


def speeds(slower: tuple[float, ...], every: int = 1) -> list[Speed]:
    """Return the machines of an epoch."""
    return [Speed(FIXED * s * t, (1 - FIXED) * s * t / BATCH) for s, t in zip(SECONDS, slower, strict=True)][::every]


def allowed(machines: list[Speed], is_equal: bool) -> float:
    """Return the samples/s that the workers' own times allow."""
    total = BATCH * len(machines)
    if is_equal:
        return total / max(one.seconds(BATCH) for one in machines)
    cut = sum(one.fixed_s / one.per_sample_s for one in machines)
    return total * sum(1 / one.per_sample_s for one in machines) / (total + cut)


def whole(machines: list[Speed], is_equal: bool) -> float:
    """Return the samples/s that the workers' own times allow with whole samples."""
    total = BATCH * len(machines)
    return allowed(machines, True) if is_equal else total / step_seconds(fastest_split(total, machines), machines)


WAYS = {
    "equal": Way("dist_sync", "equal"),
    "given": Way("dist_sync", "given"),
    "measured": Way("dist_sync", "measured"),
    "dist_auto": Way("dist_auto", "chosen", ("--groups", "auto")),
}


def run(way: Way, servers: int, rounds: int, elements: int, every: int) -> list[Rate]:
    """Run a job; returns what each epoch gave."""
    seconds, slower = SECONDS[::every], [one[::every] for one in SLOWER]
    count = len(seconds)
    best = fastest_split(BATCH * count, speeds(SLOWER[0], every))
    with tempfile.TemporaryDirectory(prefix="paceline-shares-") as folder:
        task = {
            "store_type": way.store_type, "shares": best if way.shares == "given" else way.shares,
            "elements": elements, "seconds": seconds, "fixed": FIXED, "batch": BATCH,
            "length": BATCH * count * rounds, "slower": slower, "folder": folder,
        }  # fmt: skip
        path = Path(folder, "task.json")
        path.write_text(json.dumps(task))
        launch = [sys.executable, "-m", "paceline", "launch", "-n", str(count), "-s", str(servers), *way.options, "--"]
        subprocess.run([*launch, sys.executable, WORKER, path], check=True, timeout=TIMEOUT_S, stdout=sys.stderr)
        seen = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]
    return [rate_of([worker[epoch] for worker in seen]) for epoch in range(len(SLOWER))]


def rate_of(workers: list[list[Seen]]) -> Rate:
    """Return what an epoch gave.

    Args:
        workers: the steps of each.
    """
    begin, end = max(steps[0][0] for steps in workers), min(steps[-1][1] for steps in workers)
    begin += SETTLING * (end - begin)
    settled = [[one for one in steps if begin <= one[1] <= end] for steps in workers]
    found = sum(sum(one[2] for one in steps[1:]) / (steps[-1][1] - steps[0][1]) for steps in settled)
    rounds = [one for one in zip(*(reversed(steps) for steps in workers), strict=False) if begin <= one[0][1] <= end]
    longest_s = statistics.median(max(one[3] for one in round) for round in rounds)
    step_s = statistics.median(after[1] - before[1] for before, after in pairwise(settled[0]))
    ends = [(max(one[0] + one[3] for one in round), *sorted(one[1] for one in round)) for round in rounds]
    answer_s = statistics.median(first - complete for complete, first, *_ in ends)
    queue_s = statistics.median(last - first for _, first, *_, last in ends)
    return Rate(found, *(1e3 * one for one in (longest_s, step_s - longest_s, answer_s, queue_s)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60, help="of an epoch in lock step")
    parser.add_argument("--elements", type=int, default=1024, help="of the model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="take each n-th of the six workers")
    args = parser.parse_args()
    jobs: dict[str, list[list[Rate]]] = {name: [] for name in args.ways}
    load = os.getloadavg()[0]
    for _ in range(args.repeats):
        for name in args.ways:  # one after the other, so that a drift of the machine's load affects all alike
            jobs[name].append(run(WAYS[name], args.servers, args.rounds, args.elements, args.every))
    found = {name: medians(ones) for name, ones in jobs.items()}
    epochs = [speeds(slower, args.every) for slower in SLOWER]
    Console(width=100).print(table(found, epochs))
    rows = {
        name: [
            asdict(one) | {"allowed": allowed(machines, name == "equal"), "whole": whole(machines, name == "equal")}
            for one, machines in zip(ones, epochs, strict=True)
        ]
        for name, ones in found.items()
    }
    print(json.dumps({"work": vars(args), "load_before": load, "load_after": os.getloadavg()[0], "ways": rows}))


def medians(jobs: list[list[Rate]]) -> list[Rate]:
    """Return the medians over jobs, by epoch."""
    columns = [list(zip(*(asdict(one).values() for one in epoch), strict=True)) for epoch in zip(*jobs, strict=True)]
    return [Rate(*map(statistics.median, column)) for column in columns]


def table(found: dict[str, list[Rate]], machines: list[list[Speed]]) -> Table:
    """Return a row for each way and epoch."""
    ms = [f"{1e3 * one.seconds(BATCH):.0f}" for one in machines[0]]
    out = Table(title=f"{len(ms)} workers of {', '.join(ms)} ms")
    times = "longest, ms", "beyond", "answer", "queue"
    for column in ("", "worker 0 slower", "samples/s", "allowed", "part", "whole", *times):
        out.add_column(column, justify="right" if column else "left")
    for name, epochs in found.items():
        for one, slower, these in zip(epochs, SLOWER, machines, strict=True):
            limit = allowed(these, name == "equal")
            rate, part = f"{one.samples_per_s:.0f}", f"{one.samples_per_s / limit:.1%}"
            found_ms = (f"{ms:.1f}" for ms in (one.longest_ms, one.beyond_ms, one.answer_ms, one.queue_ms))
            cut = f"{whole(these, name == 'equal'):.0f}"
            out.add_row(name, f"{slower[0]:.0f} x", rate, f"{limit:.0f}", part, cut, *found_ms)
    return out


if __name__ == "__main__":
    main()
