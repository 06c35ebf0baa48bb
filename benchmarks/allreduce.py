"""The Horovod interface and the backend of torch.distributed beside Gloo: processes of one host, in one run.

    python -m benchmarks.allreduce --repeats 3

With ``--rate`` it is the backend alone, encrypted, with a process on each of two hosts (namespaces; needs root):

    python -m benchmarks.allreduce --rate 1gbit --only lenet resnet18
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contenders import WORKER_THREADS, launched, together
from benchmarks.network import rate_of, run_workers
from tests.clusters.hosts import Hosts, HostsJob

#: Title, shapes (see `benchmarks.shapes`), steps.
REDUCED = [("102 MB in one tensor", "split-1", 20), ("161 tensors of one element", "tiny-161", 300)]
#: Network, batch of each process, steps.
TRAINED = [("lenet", 64, 60), ("resnet18", 4, 15)]


@dataclass(frozen=True)
class Row:
    """One work: milliseconds of ours, and of its peer."""

    title: str
    ours: float
    peer: str
    theirs: float


def measure(processes: int, repeats: int) -> list[Row]:
    """Measure everything; the two contenders of a row take turns."""
    rows = []
    for title, shapes, steps in REDUCED:
        ours, theirs = _turns("allreduce_worker.py", ("hvd", "gloo"), [shapes, str(steps)], processes, repeats)
        rows.append(Row(f"all-reduce, {title}", ours, "gloo", theirs))
    for network, batch, steps in TRAINED:
        arguments = [network, str(batch), str(steps)]
        ours, theirs = _turns("training_worker.py", ("hvd", "ddp"), arguments, processes, repeats)
        rows.append(Row(f"training {network}, batch {batch}", ours, "ddp", theirs))
    return rows


def _turns(script: str, contenders: tuple[str, str], arguments: list[str], processes: int, repeats: int) -> list[float]:
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name in contenders:
            found[name].append(together(script, [name, *arguments], processes)["ms"])
    return [statistics.median(found[name]) for name in contenders]


def measure_groups(processes: int, only: Sequence[str] = ()) -> list[Row]:
    """Measure the backend of torch.distributed; it and Gloo take turns in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        return _rows(launched("groups_worker.py", [f"{folder}/gloo", *only], processes, 1, {}))


def measure_groups_of_hosts(rate: str, only: Sequence[str] = ()) -> list[Row]:
    """Measure the same with a process and a server on each of two hosts; Gloo's connections are not encrypted."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(2, rate_bits_s=rate_of(rate)) as hosts,
        HostsJob(hosts, [1, 1], [1, 1], encrypt=True, check_rules=False) as job,
    ):
        variables = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": str(WORKER_THREADS)}
        return _rows(run_workers(job, 2, "groups_worker", [f"{folder}/gloo", *only], **variables))


def _rows(found: dict[str, dict[str, float]]) -> list[Row]:
    return [Row(title, one["paceline"], "gloo", one["gloo"]) for title, one in found.items()]


def lines(rows: list[Row], processes: int) -> list[str]:
    """Return the figures as Markdown."""
    text = (
        f"The Horovod interface (`hvd`), {processes} processes of one host, beside Gloo's all-reduce and DDP over Gloo:"
    )
    found = ["", text, "", "| ms per step | hvd | peer | against the peer |", "|---" * 4 + "|"]
    for row in rows:
        found.append(
            f"| {row.title} | {row.ours:.2f} | {row.theirs:.2f} ({row.peer}) | {row.theirs / row.ours:.2f} x |"
        )
    return found


def groups_lines(rows: list[Row], processes: int) -> list[str]:
    """Return the figures of the backend of torch.distributed as Markdown."""
    text = (
        f"The backend of torch.distributed (`paceline launch --ddp`), {processes} processes of one host; it and Gloo "
        "take turns in the same processes (sizes: all-reduce; networks: a step of DDP):"
    )
    found = ["", text, "", "| ms | paceline | gloo | against gloo |", "|---" * 4 + "|"]
    return found + [
        f"| {row.title} | {row.ours:.2f} | {row.theirs:.2f} | {row.theirs / row.ours:.2f} x |" for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", default="", help="of the cables of two hosts: 1gbit, 250mbit or none")
    parser.add_argument("--only", nargs="+", default=[], help="works of the backend to measure: '102 MB', lenet, ...")
    args = parser.parse_args()
    groups = measure_groups_of_hosts(args.rate, args.only) if args.rate else measure_groups(args.processes, args.only)
    for row in groups:
        print(f"{row.title}: paceline {row.ours:.3f} ms, gloo {row.theirs:.3f} ms: {row.theirs / row.ours:.2f} x")
    if args.rate or args.only:
        return
    rows = measure(args.processes, args.repeats)
    print("\n".join(lines(rows, args.processes)))
    print(json.dumps({row.title: {"hvd": row.ours, row.peer: row.theirs} for row in rows}))


if __name__ == "__main__":
    main()
