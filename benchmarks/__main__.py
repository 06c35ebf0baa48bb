"""A selection of the benchmarks in about eight minutes, as a report with a picture: ``make bench``.

The network benchmark needs root, for network namespaces. Without root it is left out, and the report says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import date
from pathlib import Path

from rich.progress import Progress

from benchmarks import allreduce, memory, network, training
from benchmarks.contenders import Work
from benchmarks.kvstore import measure
from benchmarks.picture import description, draw, figures, panels
from tests.clusters.hosts import Hosts, why_no_hosts

STORE = [
    (
        "resnet50 keys, 1 worker, 1 server",
        Work("resnet50"),
        ["arena", "shm", "tcp-arena", "tcp", "tcp-encrypted", "mxnet"],
    ),
    (
        "resnet50 keys, 2 workers, 2 servers",
        Work("resnet50", 2, 2),
        ["arena", "tcp-arena", "tcp", "tcp-encrypted", "mxnet"],
    ),
    ("resnet50 keys, 2 workers, 1 server", Work("resnet50", 2, 1), ["arena", "gloo"]),
    (
        "resnet50 keys, 2bit, 2 workers, 2 servers",
        Work("resnet50", 2, 2, codec="2bit"),
        ["arena", "tcp-arena", "mxnet"],
    ),
    ("161 keys of one element", Work("tiny-161", steps=200), ["shm", "mxnet"]),
    ("1 key of one element", Work("tiny-1", steps=500), ["shm", "mxnet"]),
    ("5,000 keys of the size of resnet50", Work("split-5000"), ["arena", "shm"]),
]

NAMES = ["arena", "shm", "tcp-arena", "tcp", "tcp-encrypted", "gloo", "mxnet"]

#: Network, batch of each worker, steps, turns.
TRAINING = [("lenet", 64, 60, 3), ("resnet18", 4, 15, 2)]

#: Of the picture: 800 pixels wide.
DPI = 160

RATE_BITS_S = 1e9
#: Encrypted, codec, servers per host.
NETWORK = [(False, "none", 1), (False, "none", 2)]
#: Transport, workers, servers.
MEMORY = [("shared", 2, 2), ("tcp", 2, 1)]

WHAT = """
- `arena`: the exchange alone; gradients and weights lie in shared memory already. `shm`: the store's verbs on the
  caller's own tensors, through shared memory. `tcp-arena` and `tcp`: the same two over loopback TCP, without shared
  memory and without encryption. The picture calls them *arena, memory*, *verbs, memory*, *arena, TCP* and *verbs, TCP*.
  `tcp-encrypted`: `tcp` with encryption, as it is by default; *verbs, encrypted* in the picture.
- `mxnet`: MXNet 1.9.1 `dist_sync` over unencrypted TCP. `gloo`: an all-reduce and a fused SGD in every process.
- In training, `paceline` is `DistributedOptimizer` with its defaults (the optimizer steps in the workers),
  `paceline-server` the same with `update="server"`, `ddp` DistributedDataParallel over Gloo, `alone` as many processes
  that exchange nothing.

SGD has momentum 0.9 and is fused in all of them. Every worker of every contender has one thread; servers share the same
cores. Figures are medians of one run in which contenders took turns. In brackets: how many times as fast as the last of
the row.
"""


def store_rows(repeats: int, progress: Progress) -> dict[str, dict[str, float]]:
    """Measure the stores; returns milliseconds by work and contender."""
    task = progress.add_task("stores", total=len(STORE))
    rows = {}
    for title, work, contenders in STORE:
        rows[title] = measure(work, contenders, repeats)
        progress.advance(task)
    return rows


def network_rows() -> list[network.Result]:
    """Measure jobs over a network of 1 Gbit/s; nothing where network namespaces cannot be made."""
    if why_no_hosts():
        return []
    with Hosts(2, rate_bits_s=RATE_BITS_S) as hosts:
        return network.measure(hosts, NETWORK, "resnet50", steps=6)


def memory_rows() -> list[memory.Result]:
    """Measure the memory of processes."""
    return [one for job in MEMORY for one in memory.measure(*job, "resnet50", steps=20)]


def network_lines(results: list[network.Result]) -> list[str]:
    """Return the network figures as Markdown."""
    if not results:
        return ["", f"Two hosts in network namespaces: left out, {why_no_hosts()}."]
    lines = ["", "resnet50 keys, 2 hosts (network namespaces) of one worker each, 1 Gbit/s in each direction:", ""]
    lines += [
        "| servers per host | pushes | ms per step | must cross, MB | sent, MB | plain TCP, MB/s | of plain TCP |"
    ]
    lines += ["|---" * 7 + "|"]
    for one in results:
        pushes = ("" if one.codec == "none" else one.codec) + (" encrypted" if one.encrypted else "")
        lines.append(
            f"| {one.servers_per_host} | {pushes.strip() or 'plain'} | {one.ms:.0f} | {one.must_cross_mb:.1f} "
            f"| {one.sent_mb:.1f} | {one.payload.both_ways:.1f} | {one.efficiency:.0%} |"
        )
    return lines


def memory_lines(results: list[memory.Result]) -> list[str]:
    """Return the memory figures as Markdown."""
    lines = ["", "Memory beyond parameters, gradients and optimizer state, resnet50 keys, after 20 steps:", ""]
    lines += ["| job | process | extra, MB | times the model |", "|---|---|---|---|"]
    for one in results:
        extra = f"{one.extra * one.model / 1e6:.0f} | {one.extra:.2f}"
        lines.append(f"| {one.transport}, {one.job} | {one.process} | {extra} |")
    return lines


def report(
    rows: dict[str, dict[str, float]], trained: dict[str, dict[str, float]], picture: str, more: list[str]
) -> str:
    """Return the whole report as Markdown."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    lines = [
        "# Benchmarks",
        "",
        f"`make bench` on {date.today().isoformat()}: {machine}.",
        WHAT,
        f"![Time per step, one panel per row of the tables]({picture})",
        "",
    ]
    lines += ["| ms per step | " + " | ".join(NAMES) + " |", "|---|" + "---|" * len(NAMES)]
    for title, times in rows.items():
        last = list(times.values())[-1]
        cells = [f"{times[name]:.2f} ({last / times[name]:.1f} x)" if name in times else "" for name in NAMES]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    columns = ["paceline", "paceline-server", "ddp", "alone"]
    lines += ["", f"| training, ms per step | {' | '.join(columns)} | against ddp |", "|---" * 6 + "|"]
    for title, times in trained.items():
        cells = " | ".join(f"{times[name]:.1f}" for name in columns)
        lines.append(f"| {title} | {cells} | {times['ddp'] / times['paceline']:.2f} x |")
    return "\n".join([*lines, *more]) + "\n"


def redraw(path: Path) -> None:
    """Draw the picture beside a report from the report's tables; a test reads its description."""
    rows = panels(*figures(path.read_text()))
    draw(rows).savefig(path.with_suffix(".png"), dpi=DPI, metadata={"Description": description(rows)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("docs/benchmarks.md"))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--redraw", action="store_true", help="measure nothing; draw the report's picture again")
    args = parser.parse_args()
    if args.redraw:
        redraw(args.report)
        return
    with Progress() as progress:
        rows = store_rows(args.repeats, progress)
        task = progress.add_task("training", total=len(TRAINING))
        trained = {}
        for name, batch, steps, turns in TRAINING:
            times = training.measure(name, 2, 1, batch, steps, turns * args.repeats)
            trained[f"{name}, 2 workers, batch {batch}"] = times
            progress.advance(task)
        task = progress.add_task("Horovod interface, backend, network and memory", total=4)
        reduced = allreduce.measure(2, args.repeats)
        progress.advance(task)
        grouped = allreduce.measure_groups(2)
        progress.advance(task)
        crossed = network_rows()
        progress.advance(task)
        held = memory_rows()
        progress.advance(task)
    picture = args.report.with_suffix(".png").name
    more = [*allreduce.lines(reduced, 2), *allreduce.groups_lines(grouped, 2)]
    more += [*network_lines(crossed), *memory_lines(held)]
    args.report.write_text(report(rows, trained, picture, more))
    redraw(args.report)
    print(args.report.read_text())
    print(json.dumps({"stores": rows, "training": trained}))


if __name__ == "__main__":
    main()
