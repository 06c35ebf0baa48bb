"""Push, optimizer and pull of all keys of a model: paceline beside MXNet and Gloo, in one run.

    python -m benchmarks.kvstore --shapes resnet50 --workers 2 --servers 2 shm arena mxnet

Contenders take turns, so that a drift of the machine's speed affects them alike. Figures are medians. Ratios are
against the last contender named.
"""

from __future__ import annotations

import argparse
import json
import statistics

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import Work, run


def measure(work: Work, contenders: list[str], repeats: int) -> dict[str, float]:
    """Return the median milliseconds per step of each contender."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name in contenders:
            found[name].append(run(name, work)["ms"])
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", default=["shm", "arena", "tcp", "mxnet"])
    parser.add_argument("--shapes", default="resnet50", help="resnet50, lenet, bert-base, tiny-N or split-N")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--optimizer", default="sgd", choices=["sgd", "none"], help="sgd: with momentum 0.9")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    work = Work(args.shapes, args.workers, args.servers, args.optimizer, args.codec, args.steps)
    times = measure(work, args.contenders, args.repeats)
    table = Table(
        title=f"{work.shapes}, {work.workers} workers, {work.servers} servers, {work.optimizer}, {work.codec}"
    )
    for column in ("", "ms per step", f"against {args.contenders[-1]}"):
        table.add_column(column, justify="left" if not column else "right")
    for name, ms in times.items():
        table.add_row(name, f"{ms:.2f}", f"{times[args.contenders[-1]] / ms:.2f} x")
    Console(width=100).print(table)
    print(json.dumps({"work": vars(args), "ms": times}))


if __name__ == "__main__":
    main()
