"""Samples per second of unlike workers, against what their own times allow.

    python -m benchmarks.unequal.shares --repeats 3

A worker sleeps for the time that its machine would compute, a fixed part and a part per sample, so six of them fit on
two cores. Each job trains two epochs: in the second one worker 0 takes twice as long. The beginning of each epoch is
left out; it has the rounds in which shares follow.

*Allowed* is what the workers' times alone allow, without messages and with parts of samples: samples/s of all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.hetero import Speed, fastest_split

#: Seconds of a batch, by worker, and the part of it that does not depend on its samples.
SECONDS, FIXED, BATCH = (0.06, 0.06, 0.12, 0.12, 0.24, 0.24), 0.2, 16
#: In the second epoch worker 0 takes twice as long.
SLOWER = ((1.0,) * len(SECONDS), (2.0, *(1.0,) * (len(SECONDS) - 1)))
#: Part of an epoch that is not measured.
SETTLING = 0.4
WORKER = Path(__file__).parents[1] / "workers" / "shares_worker.py"


@dataclass(frozen=True)
class Way:
    """A way to give work to the workers."""

    store_type: str
    shares: str | tuple[float, ...]
    arguments: tuple[str, ...] = ()


def allowed(slower: tuple[float, ...]) -> float:
    """Return the samples per second that finish together, where samples can be cut."""
    return sum(BATCH / (one * factor) for one, factor in zip(SECONDS, slower, strict=True))


def equal(slower: tuple[float, ...]) -> float:
    """Return the samples per second in lock step with equal batches."""
    return BATCH * len(SECONDS) / max(one * factor for one, factor in zip(SECONDS, slower, strict=True))


def best_fractions() -> tuple[float, ...]:
    """Return the shares that machines of known speeds would be given."""
    speeds = [Speed(FIXED * one, (1 - FIXED) * one / BATCH) for one in SECONDS]
    return tuple(map(float, fastest_split(BATCH * len(SECONDS), speeds)))


WAYS = {
    "equal": Way("dist_sync", "equal"),
    "given": Way("dist_sync", best_fractions()),
    "measured": Way("dist_sync", "measured"),
    "dist_auto": Way("dist_auto", "chosen", ("--groups", "auto")),
}


def run(way: Way, servers: int, rounds: int, elements: int) -> list[tuple[float, float]]:
    """Run a job; returns samples/s of each epoch, and the milliseconds of a step beyond the longest computation."""
    with tempfile.TemporaryDirectory(prefix="paceline-shares-") as folder:
        task = {
            "store_type": way.store_type, "shares": way.shares, "elements": elements, "seconds": SECONDS,
            "fixed": FIXED, "batch": BATCH, "length": BATCH * len(SECONDS) * rounds, "slower": SLOWER,
            "folder": folder,
        }  # fmt: skip
        path = Path(folder, "task.json")
        path.write_text(json.dumps(task))
        command = [
            sys.executable, "-m", "paceline", "launch", "-n", str(len(SECONDS)), "-s", str(servers), *way.arguments,
            "--", sys.executable, str(WORKER), str(path),
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=600, stdout=sys.stderr)
        seen = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(len(SECONDS))]
    return [rate([worker[epoch] for worker in seen]) for epoch in range(len(SLOWER))]


def rate(workers: list[list[tuple[float, float, int, float]]]) -> tuple[float, float]:
    """Return samples/s in the settled part of an epoch, and median milliseconds of a step beyond its computation."""
    begin = max(steps[0][0] for steps in workers)
    end = min(steps[-1][1] for steps in workers)
    begin += SETTLING * (end - begin)
    found, beyond = 0.0, []
    for steps in workers:
        inside = [one for one in steps if begin <= one[1] <= end]
        found += sum(one[2] for one in inside[1:]) / (inside[-1][1] - inside[0][1])
    for row in zip(*workers, strict=False):
        beyond.append(max(one[1] for one in row) - min(one[0] for one in row) - max(one[3] for one in row))
    return found, 1e3 * statistics.median(beyond[len(beyond) // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60, help="of an epoch in lock step with shares")
    parser.add_argument("--elements", type=int, default=1024, help="of the model")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in args.ways}
    load = os.getloadavg()[0]
    for _ in range(args.repeats):
        for name in args.ways:
            found[name].append(run(WAYS[name], args.servers, args.rounds, args.elements))
            print(name, found[name][-1], file=sys.stderr, flush=True)
    report(args, found, load)


def report(args: Any, found: dict[str, list[list[tuple[float, float]]]], load: float) -> None:
    table = Table(title="samples/s of all workers")
    for column in ("", "samples/s", "allowed", "part", "slower: samples/s", "allowed", "part", "beyond, ms"):
        table.add_column(column, justify="right" if column else "left")
    rows: dict[str, Any] = {}
    for name, jobs in found.items():
        limits = [(equal if name == "equal" else allowed)(slower) for slower in SLOWER]
        rates = [statistics.median(job[epoch][0] for job in jobs) for epoch in range(len(SLOWER))]
        beyond = [statistics.median(job[epoch][1] for job in jobs) for epoch in range(len(SLOWER))]
        parts = [one / limit for one, limit in zip(rates, limits, strict=True)]
        rows[name] = {"samples_per_s": rates, "allowed": limits, "part": parts, "beyond_ms": beyond}
        cells = [f"{one:.0f}|{limit:.0f}|{part:.1%}" for one, limit, part in zip(rates, limits, parts, strict=True)]
        table.add_row(name, *"|".join(cells).split("|"), " ".join(f"{one:.1f}" for one in beyond))
    Console(width=110).print(table)
    print(json.dumps({"work": vars(args), "load": load, "ways": rows}))


if __name__ == "__main__":
    main()
