"""Steps with everything that paceline notes about them, against steps without: what the account and the recorder cost.

    python -m benchmarks.observed

One job per network, with one worker and one server. Blocks of steps with and without take turns, in an order that is
drawn for each pair: a drift of the machine's speed meets both alike. A pair gives the ratio of the blocks' medians;
the table has the median of the pairs and the bounds of 95 % for it (from the order of the pairs, without a model of the
noise). The worker and the server are switched; heartbeats and their figures of the host go on. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import launched

#: Steps of a block, and samples of a step, by network: a block takes some seconds.
BLOCKS = {"lenet": (100, 64), "resnet18": (6, 8)}

#: Longest time of a job on a busy machine.
TIMEOUT_S = 1800.0

#: Probability that the median lies within the bounds, at least.
COVERED = 0.95


def bounds(ratios: Sequence[float]) -> tuple[float, float]:
    """Return bounds between which the median lies: those of the sign test."""
    ordered, count = sorted(ratios), len(ratios)
    # The number of pairs above the median is binomial: the tails below `cut` have less than what is not covered.
    tail, term, cut = 0.0, 0.5**count, 0
    while tail + term <= (1 - COVERED) / 2:
        tail += term
        cut += 1
        term *= (count - cut + 1) / cut
    low = max(0, cut - 1)
    return ordered[low], ordered[-1 - low]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--pairs", type=int, default=30)
    args = parser.parse_args()
    table = Table(title=f"steps with and without account and recorder, {args.pairs} pairs")
    for column in ("", "with, ms", "without, ms", "ratio", "95 %"):
        table.add_column(column, justify="right" if column else "left")
    rows = {}
    load = os.getloadavg()[0]
    for network in args.networks:
        steps, batch = BLOCKS[network]
        print(f"{network}: {2 * args.pairs} blocks of {steps} steps", file=sys.stderr, flush=True)
        arguments = [network, str(batch), str(steps), str(args.pairs)]
        extra = {"PACELINE_ALLOW": "benchmarks.switch:observe"}
        pairs = launched("observed_worker.py", arguments, 1, 1, extra, TIMEOUT_S)["pairs"]
        ratios = [on / off for on, off in pairs]
        (low, high), ratio = bounds(ratios), statistics.median(ratios)
        on_ms, off_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows[network] = {"on_ms": on_ms, "off_ms": off_ms, "ratio": ratio, "low": low, "high": high}
        table.add_row(network, f"{on_ms:.2f}", f"{off_ms:.2f}", f"{ratio:.4f}", f"{low:.4f} to {high:.4f}")
    Console(width=100).print(table)
    print(json.dumps({"work": vars(args), "load_before": load, "load_after": os.getloadavg()[0], "networks": rows}))


if __name__ == "__main__":
    main()
