"""Training steps of real networks: paceline beside DDP over Gloo and one process without communication, in one run.

python -m benchmarks.training --network lenet --workers 2 --servers 1
"""

from __future__ import annotations

import argparse
import json
import statistics

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import launched, together

SCRIPT = "training_worker.py"


def measure(network: str, workers: int, servers: int, batch: int, steps: int, repeats: int) -> dict[str, float]:
    """Return the median milliseconds per step of each contender.

    ``paceline`` steps in the workers, ``paceline-server`` on the servers; ``alone`` is as many processes that exchange
    nothing. All have the same network, the same fused SGD and one thread per worker.
    """
    arguments = [network, str(batch), str(steps)]
    contenders = {
        "paceline": lambda: launched(SCRIPT, ["paceline", *arguments], workers, servers, {}),
        "paceline-server": lambda: launched(SCRIPT, ["paceline-server", *arguments], workers, servers, {}),
        "ddp": lambda: together(SCRIPT, ["ddp", *arguments], workers),
        "alone": lambda: together(SCRIPT, ["alone", *arguments], workers),
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, job in contenders.items():
            found[name].append(job()["ms"])
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="lenet", choices=["mlp", "lenet", "resnet18"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    times = measure(args.network, args.workers, args.servers, args.batch_size, args.steps, args.repeats)
    table = Table(title=f"{args.network}, {args.workers} workers, batch {args.batch_size}")
    for column in ("", "ms per step", "samples/s per worker", "exposed communication", "against ddp"):
        table.add_column(column, justify="right" if column else "left")
    for name, ms in times.items():
        exposed, ratio = max(0.0, ms - times["alone"]), times["ddp"] / ms
        table.add_row(name, f"{ms:.1f}", f"{args.batch_size / ms * 1e3:.0f}", f"{exposed:.1f} ms", f"{ratio:.2f} x")
    Console(width=100).print(table)
    print(json.dumps({"work": vars(args), "ms": times}))


if __name__ == "__main__":
    main()
