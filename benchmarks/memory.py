"""Steady-state memory of workers and servers, beyond parameters, gradients and optimizer state.

    python -m benchmarks.memory --shapes resnet50 --transports shared unix tcp --jobs 1x1 2x2 2x1

*Needed* is what a process must hold: a worker its parameters and the gradients that it pushes, a server its part of the
values and of the momentum. (The loop's own gradients take no memory here.) *Extra* is the growth of a process since
before the first key, minus *needed*, in units of the whole model. It counts private memory and the shared arenas that
the process has made, so each arena counts once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.shapes import shapes_of
from paceline import DistributedOptimizer
from paceline.testing import LocalJob, listen, tell

TRANSPORTS: dict[str, dict[str, bool]] = {
    "shared": {},
    "unix": {"shared_memory": False, "encrypt": False},
    "tcp": {"shared_memory": False, "unix_sockets": False, "encrypt": False},
}
MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (?P<inode>\d+) +(?P<path>.*)$", re.MULTILINE)
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Memory:
    """Memory of a process, in bytes."""

    rss: int
    pss: int
    private: int
    """Resident, without paceline's shared arenas."""
    made: int
    """Shared arenas that it has made."""
    mapped: int
    """Shared arenas that others have made."""


@dataclass(frozen=True)
class Result:
    transport: str
    job: str
    process: str
    before: Memory
    after: Memory
    needed: int
    model: int

    @property
    def extra(self) -> float:
        """Times the model."""
        grown = self.after.private + self.after.made - self.before.private - self.before.made
        return (grown - self.needed) / self.model


# ---- looking at a process ------------------------------------------------------------------------------------------


def memory_of(pids: Sequence[int]) -> list[Memory]:
    """Return the present memory of processes that share memory only with each other."""
    smaps = [Path(f"/proc/{pid}/smaps").read_text() for pid in pids]
    arenas, makers = [_arenas(text) for text in smaps], _makers(pids)
    found = []
    for pid, mapped in zip(pids, arenas, strict=True):
        rollup = _fields(Path(f"/proc/{pid}/smaps_rollup").read_text())
        private = rollup["Rss"] - sum(rss for rss, _ in mapped.values())
        made = sum(size for inode, (_, size) in mapped.items() if makers.get(inode) == pid)
        all_mapped = sum(size for _, size in mapped.values())
        found.append(Memory(rollup["Rss"], rollup["Pss"], private, made, all_mapped - made))
    return found


def _fields(text: str) -> dict[str, int]:
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}


def _arenas(smaps: str) -> dict[int, tuple[int, int]]:
    """Return resident and mapped size of paceline's shared memory, by inode."""
    found: dict[int, tuple[int, int]] = {}
    heads = list(MAPPING.finditer(smaps))
    ends = [head.start() for head in heads[1:]] + [len(smaps)]
    for head, end in zip(heads, ends, strict=True):
        if head["path"].startswith("/memfd:paceline"):
            fields, inode = _fields(smaps[head.end() : end]), int(head["inode"])
            rss, size = found.get(inode, (0, 0))
            found[inode] = rss + fields["Rss"], size + fields["Size"]
    return found


def _makers(pids: Sequence[int]) -> dict[int, int]:
    """Return who made each memfd, by inode: who maps another's keeps at most one descriptor, the maker has its own."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor was closed in the meantime
                counts[entry.stat().st_ino][pid] += 1
    return {inode: count.most_common(1)[0][0] for inode, count in counts.items()}


# ---- the job -------------------------------------------------------------------------------------------------------


def train(shapes: str, steps: int) -> None:
    """Run in every worker: train these parameters with gradients that take no memory."""
    torch.set_num_threads(1)
    _train([(1,)], 1)  # loads code here and on the servers
    _show("before")
    _train(shapes_of(shapes), steps)
    _show("after")


def _train(shapes: Sequence[tuple[int, ...]], steps: int) -> DistributedOptimizer:
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    inner = torch.optim.SGD(params, lr=0.01, momentum=0.9)
    optimizer = DistributedOptimizer(inner, "dist_sync", update="server")
    for param in params:
        param.grad = torch.tensor(1e-3).expand_as(param)  # copied into the arena by the first step, and gone
    for _ in range(steps):
        optimizer.step()
    return optimizer


def _show(when: str) -> None:
    tell(when)
    listen(TIMEOUT_S)


def measure(transport: str, workers: int, servers: int, shapes: str, steps: int) -> list[Result]:
    """Run one job; returns a result per process."""
    model = 4 * sum(torch.Size(shape).numel() for shape in shapes_of(shapes))
    with LocalJob(workers, servers, check_rules=False, **TRANSPORTS[transport]) as job:
        running = job.start_all(train, shapes, steps)
        processes = [*job.servers, *running]
        seen: list[list[Memory]] = []
        for when in ("before", "after"):
            assert [worker.heard(TIMEOUT_S) for worker in running] == [when] * workers
            seen.append(memory_of([one.pid for one in processes]))
            for worker in running:
                worker.tell("go on")
        for worker in running:
            worker.result(TIMEOUT_S)
    title = f"{workers}x{servers}"
    results = []
    for process, before, after in zip(processes, *seen, strict=True):
        needed = 2 * model // servers if process in job.servers else 2 * model
        results.append(Result(transport, title, process.name.split(" (")[0], before, after, needed, model))
    return results


def table_of(results: Sequence[Result], title: str) -> Table:
    table = Table(title=title)
    for heading in ("transport", "job", "process"):
        table.add_column(heading)
    for heading in ("before", "RSS", "PSS", "private", "made", "mapped", "needed", "extra, models"):
        table.add_column(heading, justify="right")
    for one in results:
        after = one.after
        sizes = [one.before.rss, after.rss, after.pss, after.private, after.made, after.mapped, one.needed]
        table.add_row(one.transport, one.job, one.process, *(f"{size / 1e6:.0f}" for size in sizes), f"{one.extra:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="resnet50", help="resnet50, lenet, bert-base, tiny-N or split-N")
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=list(TRANSPORTS))
    parser.add_argument("--jobs", nargs="+", default=["1x1", "2x2", "2x1"], help="workers x servers")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    results = []
    for transport in args.transports:
        for job in args.jobs:
            workers, servers = map(int, job.split("x"))
            results += measure(transport, workers, servers, args.shapes, args.steps)
    Console(width=120).print(table_of(results, f"{args.shapes}, {args.steps} steps, MB"))
    print(json.dumps({"work": vars(args), "results": [asdict(one) | {"extra": one.extra} for one in results]}))


if __name__ == "__main__":
    main()
