"""Local steps on slow networks: the share of time in which machines compute, and the loss at equal samples.

    python -m benchmarks.slow_networks computing --rate 50mbit 200mbit --case none:1 int4:32 int4:128 chunktopk:32 auto
    python -m benchmarks.slow_networks loss --case chunktopk:32 int4:128 int4:128:mean --seeds 3

A case is a codec and a period, with ``mean`` where weights are averaged without outer momentum; or ``auto``. A table is
printed, and a line of JSON with the same figures.

*Computing* needs root: hosts are network namespaces, each with a worker and a server. A step waits as long as an
accelerator would compute, and then runs SGD on all weights. The share counts over whole periods after the first.

*Loss* trains a transformer of one layer on characters of Python's help texts with AdamW, and compares with one process
that sees as many samples in as many steps: the batch of one process is that of all workers together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.network import WORKERS, rate_of
from paceline.testing import LocalJob
from tests.clusters.hosts import Hosts, HostsJob, why_no_hosts

TIMEOUT_S = 3600.0

#: The outer optimizer of averages; with chunktopk the error feedback stands in for momentum.
MEAN = {"outer": {"lr": 1.0, "momentum": 0.0}}


def options_of(case: str) -> dict[str, Any]:
    """Return the options of a DistributedOptimizer; one step is lock step."""
    if case == "auto":
        return {"local_steps": "auto"}
    codec, number, *outer = case.split(":")
    steps = int(number)
    coded = {} if codec == "none" else {"compression": {"type": codec, "leg": "both"}}
    if steps == 1:
        return coded
    late = {"delay": steps // 4}
    return {"local_steps": steps, **late, **coded, **(MEAN if outer or codec == "chunktopk" else {})}


def run(job: LocalJob, count: int, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the worker's script as all workers of a job; returns what each has found."""
    command = [sys.executable, "-m", "benchmarks.workers.local_steps_worker", json.dumps(task)]
    workers = [
        subprocess.Popen(
            job.host_of("worker", rank).command(command) if isinstance(job, HostsJob) else command,
            env=job.environment("worker", rank), stdout=subprocess.PIPE, cwd=WORKERS.parents[1], text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=TIMEOUT_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"a worker failed:\n{''.join(outputs)}\n{job.report()}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


# ---- computing -------------------------------------------------------------------------------------------------------


def computing(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the share of time in which workers compute, for each rate, codec and period."""
    if why_no_hosts():
        raise SystemExit(f"this benchmark makes network namespaces: {why_no_hosts()}")
    found = []
    for rate in args.rate:
        for case in args.case:
            with (
                Hosts(args.hosts, rate_bits_s=rate_of(rate)) as hosts,
                HostsJob(hosts, [1] * args.hosts, [1] * args.hosts, check_rules=False) as job,
            ):
                task = {
                    "numel": args.numel, "step_s": args.step_s, "options": options_of(case),
                    "warm": 4 if case == "auto" else 2, "periods": max(args.periods, 4 if case.endswith(":1") else 0),
                }  # fmt: skip
                shares = run(job, args.hosts, task)
            one = {"rate": rate, "case": case, **shares[0]}
            one["computing"] = statistics.fmean(share["computing"] for share in shares)
            print(json.dumps(one), file=sys.stderr, flush=True)
            found.append(one)
    return found


# ---- loss ------------------------------------------------------------------------------------------------------------


def losses(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the loss at equal samples, for each case, and that of one process."""
    task = {"lr": args.lr, "total": args.total, "batch": args.batch}
    found = []
    for seed in range(args.seeds):
        command = [sys.executable, "-m", "benchmarks.workers.local_steps_worker"]
        alone = {**task, "seed": seed, "options": None, "batch": args.workers * args.batch}
        done = subprocess.run(
            [*command, json.dumps(alone)], stdout=subprocess.PIPE, check=True, text=True, cwd=WORKERS.parents[1]
        )
        base = json.loads(done.stdout.splitlines()[-1])["loss"]
        for case in args.case:
            with LocalJob(args.workers, 1, check_rules=False) as job:
                loss = run(job, args.workers, {**task, "seed": seed, "options": options_of(case)})[0]["loss"]
            one = {"case": case, "seed": seed, "alone": base, "loss": loss, "gap": loss / base - 1}
            print(json.dumps(one), file=sys.stderr, flush=True)
            found.append(one)
    return found


# ---- what is printed -------------------------------------------------------------------------------------------------


def shown(found: Sequence[dict[str, Any]], what: str) -> Table:
    """Return a table with a line for each rate and case."""
    if what == "computing":
        table = Table("rate", "case", "computing", "plan")
        for one in found:
            table.add_row(one["rate"], one["case"], f"{one['computing']:.1%}", one["plan"])
        return table
    table = Table("case", "seeds", "loss", "one process", "more loss", "least", "most")
    for case in dict.fromkeys(one["case"] for one in found):
        some = [one for one in found if one["case"] == case]
        gaps = [one["gap"] for one in some]
        means = (f"{statistics.fmean(one[what] for one in some):.4f}" for what in ("loss", "alone"))
        parts = (f"{gap:+.1%}" for gap in (statistics.fmean(gaps), min(gaps), max(gaps)))
        table.add_row(case, str(len(some)), *means, *parts)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("computing", "loss"))
    parser.add_argument("--rate", nargs="+", default=["50mbit", "1gbit"], help="of every cable, in each direction")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument(
        "--case", nargs="+", default=["none:1", "chunktopk:32", "int4:128"], help="CODEC:H[:mean], or auto"
    )
    parser.add_argument("--numel", type=int, default=30_000_000, help="weights")
    parser.add_argument("--step-s", type=float, default=0.1, help="computation of a step")
    parser.add_argument("--periods", type=int, default=2, help="that are measured")
    parser.add_argument("--workers", type=int, default=2, help="of the loss")
    parser.add_argument("--total", type=int, default=2560, help="steps of the loss")
    parser.add_argument("--batch", type=int, default=8, help="of a worker of the loss")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="write what was found, a JSON object per line")
    args = parser.parse_args()
    found = computing(args) if args.what == "computing" else losses(args)
    if args.save is not None:
        args.save.write_text("".join(f"{json.dumps(one)}\n" for one in found))
    Console(width=160).print(shown(found, args.what))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
