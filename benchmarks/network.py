"""Lock-step training over a network of a known rate: hosts are network namespaces, so this needs root.

    python -m benchmarks.network --rate 1gbit --servers-per-host 1 2 --codec none 2bit

Every host has one worker, which pushes all gradients of a model and waits for all new weights.

- *Must cross*: what placement sends over a host's cable in each step, in the direction that has more.
- *Payload*: what plain TCP streams carry between the same namespaces, one way and in both directions at once, right
  before or after, whichever is more.
- *Efficiency*: must cross / time / payload in both directions.
- *Sent* and *received*: what host 0's interface counted per step, with the headers of TCP and ours.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.shapes import shapes_of
from paceline import compression
from paceline.config import Settings
from paceline.layout.placement import KeySize, place
from tests.clusters.hosts import Hosts, HostsJob, why_no_hosts

WORKERS = Path(__file__).parent / "workers"
TIMEOUT_S = 300.0
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Payload:
    """What plain TCP carries from host 0 to host 1, in MB/s."""

    one_way: float
    both_ways: float


@dataclass(frozen=True)
class Result:
    servers_per_host: int
    codec: str
    encrypted: bool
    ms: float
    must_cross_mb: float
    sent_mb: float
    received_mb: float
    payload: Payload

    @property
    def efficiency(self) -> float:
        return self.must_cross_mb / (self.ms / 1e3) / self.payload.both_ways


def rate_of(text: str) -> float | None:
    """Return bits per second; None for ``none``.

    Raises:
        ValueError: not a rate.
    """
    if text == "none":
        return None
    unit = next((unit for unit in UNITS if text.endswith(unit)), None)
    if unit is None:
        raise ValueError(f"{text!r} is no rate; write 1gbit, 250mbit or none")
    return float(text.removesuffix(unit)) * UNITS[unit]


# ---- what a link carries -------------------------------------------------------------------------------------------


def payload_of(hosts: Hosts, seconds: float = 2.0) -> Payload:
    """Measure plain TCP streams between the first two hosts."""
    return Payload(min(_streams(hosts, [(0, 1)], seconds)), min(_streams(hosts, [(0, 1), (1, 0)], seconds)))


def _streams(hosts: Hosts, pairs: Sequence[tuple[int, int]], seconds: float) -> list[float]:
    script = [sys.executable, str(WORKERS / "stream_worker.py")]
    listeners, senders = [], []
    for source, target in pairs:
        listen = hosts[target].command([*script, "listen", hosts[target].address])
        listeners.append(subprocess.Popen(listen, stdout=subprocess.PIPE, text=True))
        port = _line(listeners[-1])["port"]
        send = [*script, "send", hosts[target].address, str(port), str(seconds)]
        senders.append(subprocess.Popen(hosts[source].command(send)))
    found = [_line(listener) for listener in listeners]
    for process in (*listeners, *senders):
        process.wait(TIMEOUT_S)
    return [one["bytes"] / one["seconds"] / 1e6 for one in found]


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


# ---- what a job sends ----------------------------------------------------------------------------------------------


def must_cross_mb(shapes: str, codec: str, servers: Sequence[int]) -> float:
    """Return the payload that a host's cable carries per step, in the direction and at the host that have most.

    Args:
        shapes: name of the keys' shapes.
        codec: of the pushes.
        servers: how many every host has; every host has one worker.
    """
    keys = [KeySize(index, math.prod(shape)) for index, shape in enumerate(shapes_of(shapes))]
    layout = place(keys, sum(servers), bound=Settings().bigarray_bound)
    host_of = [host for host, count in enumerate(servers) for _ in range(count)]
    grads, values = [0] * len(servers), [0] * len(servers)
    for bucket in layout.buckets:
        grads[host_of[bucket.server]] += _coded_bytes(bucket.length, codec)
        values[host_of[bucket.server]] += 4 * bucket.length
    others = len(servers) - 1
    sent = [sum(grads) - grads[host] + others * values[host] for host in range(len(servers))]
    received = [others * grads[host] + sum(values) - values[host] for host in range(len(servers))]
    return max(*sent, *received) / 1e6


def _coded_bytes(numel: int, name: str) -> int:
    codec = compression.make(None if name == "none" else name)
    if codec is None:
        return 4 * numel
    return len(memoryview(codec.encode(torch.zeros(numel), codec.new_state(numel))))


def step_of(hosts: Hosts, servers_per_host: int, shapes: str, codec: str, steps: int, encrypt: bool) -> dict[str, Any]:
    """Run one job; returns what its worker 0 measured."""
    count = len(hosts)
    with HostsJob(hosts, [1] * count, [servers_per_host] * count, encrypt=encrypt, check_rules=False) as job:
        return run_workers(job, count, "paceline_worker", [shapes, "sgd", codec, str(steps)], BENCHMARK_ARENA="1")


def run_workers(job: HostsJob, count: int, script: str, arguments: Sequence[str], **variables: str) -> dict[str, Any]:
    """Run a script of ``benchmarks/workers`` as the workers of a job; returns the last line of worker 0, decoded."""
    command = [sys.executable, "-m", f"benchmarks.workers.{script}", *arguments]
    workers = [
        subprocess.Popen(
            job.host_of("worker", rank).command(command),
            env=job.environment("worker", rank) | variables,
            stdout=subprocess.PIPE,
            cwd=WORKERS.parents[1],
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [worker.communicate(timeout=TIMEOUT_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"a worker failed:\n{''.join(outputs)}\n{job.report()}")
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def measure(hosts: Hosts, jobs: Sequence[tuple[bool, str, int]], shapes: str, steps: int) -> list[Result]:
    """Measure jobs, each given as (encrypted, codec, servers per host), and the link before and after each."""
    results, before = [], payload_of(hosts)
    for encrypted, codec, servers in jobs:
        found = step_of(hosts, servers, shapes, codec, steps, encrypted)
        after = payload_of(hosts)
        payload = Payload(max(before.one_way, after.one_way), max(before.both_ways, after.both_ways))
        must = must_cross_mb(shapes, codec, [servers] * len(hosts))
        results.append(
            Result(servers, codec, encrypted, found["ms"], must, found["sent_mb"], found["received_mb"], payload)
        )
        before = after
    return results


def table_of(results: Sequence[Result], title: str) -> Table:
    table = Table(title=title)
    for heading in ("servers / host", "codec", "encrypted"):
        table.add_column(heading)
    for heading in ("ms / step", "must cross MB", "sent MB", "received MB", "payload MB/s", "efficiency"):
        table.add_column(heading, justify="right")
    for one in results:
        table.add_row(
            str(one.servers_per_host), one.codec, "yes" if one.encrypted else "no", f"{one.ms:.1f}",
            f"{one.must_cross_mb:.2f}", f"{one.sent_mb:.2f}", f"{one.received_mb:.2f}",
            f"{one.payload.one_way:.1f} / {one.payload.both_ways:.1f}", f"{one.efficiency:.1%}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of every cable, in each direction: 1gbit, 250mbit or none")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--servers-per-host", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shapes", default="resnet50", help="resnet50, lenet, bert-base, tiny-N or split-N")
    parser.add_argument("--codec", nargs="+", default=["none"], help="of the pushes")
    parser.add_argument("--encrypt", type=int, nargs="+", default=[0], choices=[0, 1])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    if why_no_hosts():
        raise SystemExit(f"this benchmark makes network namespaces: {why_no_hosts()}")
    jobs = [(bool(e), c, s) for e in args.encrypt for c in args.codec for s in args.servers_per_host]
    with Hosts(args.hosts, rate_bits_s=rate_of(args.rate)) as hosts:
        results = measure(hosts, jobs, args.shapes, args.steps)
    Console(width=120).print(table_of(results, f"{args.shapes}, {args.hosts} hosts of one worker, {args.rate}"))
    found = [asdict(one) | {"efficiency": one.efficiency} for one in results]
    print(json.dumps({"work": vars(args), "results": found}))


if __name__ == "__main__":
    main()
