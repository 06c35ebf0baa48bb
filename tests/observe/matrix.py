"""``python -m tests.observe.matrix``: real jobs in which one process is slow; a table of the verdicts, right and wrong.

Four workers in lock step, in processes of their own. Faults begin at round :data:`ONSET`. Root is needed for quotas,
memory limits (cgroups of version 1) and networks (namespaces); trials of faults that this machine has no means for are
left out, and told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import mmap
import os
import random
import re
import runpy
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.testing import LocalJob
from tests.busy.load import busy
from tests.clusters.hosts import Hosts, HostsJob, NamespaceHost, why_no_hosts

WORKERS, SLOW, ONSET, AFTER = 4, 1, 30, 60
CGROUPS = Path("/sys/fs/cgroup")

#: By fault: causes that are right.
RIGHT: dict[str, tuple[str, ...]] = {
    "none": (),
    "crowd8": (),
    "crowd24": (),
    "backward": ("computation",),
    "loader": ("its data loader",),
    "quota": ("the CPU quota of its cgroup",),
    "neighbour": ("other processes on its processors",),
    "memory": ("reclaiming memory and reading it back from disk",),
    "gc": ("Python's garbage collection",),
    "stops": ("stops of the whole process",),
    "link": ("its network", "sending gradients"),
    "delay": ("its network", "sending gradients"),
    "server": ("the CPU quota of its cgroup is used up",),
}


# ---- the worker ------------------------------------------------------------------------------------------------------


def train(fault: str, jitter: float, rounds: int, folder: str, compute_s: float) -> None:
    """Train; the slow worker has its fault from :data:`ONSET` on, unless it comes from outside."""
    import torch

    import paceline

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            time.sleep(ctx.seconds)
            return grad, None

    class Burn(torch.nn.Module):
        seconds = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                x @ torch.ones(256, 256)
            return x

    class Samples(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return rounds

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.15 if is_slow and fault == "loader" and index >= ONSET else 0.002)
            return torch.ones(256)

    store = paceline.kvstore.create("dist_sync")
    is_slow = store.rank == SLOW
    burn = Burn()
    model = torch.nn.Sequential(burn, torch.nn.Linear(256, 256))
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), kvstore=store, model=model)
    chance = random.Random(f"{store.rank} {fault} {jitter}")
    table = mapped(Path(folder, "data")) if fault == "memory" and is_slow else None
    if fault == "gc" and is_slow:
        gc.callbacks.append(
            lambda phase, info: time.sleep(0.1) if phase == "start" and info["generation"] == 2 else None
        )
    progress = os.open(Path(folder, f"round-{store.rank}"), os.O_CREAT | os.O_WRONLY)
    for number, batch in enumerate(torch.utils.data.DataLoader(Samples(), batch_size=1)):
        os.pwrite(progress, f"{number:9}".encode(), 0)
        longer = chance.lognormvariate(0, jitter) if jitter else 1.0
        burn.seconds = compute_s * longer
        if table is not None:
            sum(table[at] for at in range(0, len(table), 4096))
        optimizer.zero_grad()
        extra = 0.2 if fault == "backward" and is_slow and number >= ONSET else 0.0
        Pause.apply(model(batch), 0.05 * longer + extra).sum().backward()
        optimizer.step()
        if fault == "gc" and is_slow and number >= ONSET and number % 10 == 0:
            gc.collect()


def mapped(path: Path, size: int = 64 << 20) -> mmap.mmap:
    """Return a file in memory, which the kernel may take away and read again."""
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


# ---- faults from outside ---------------------------------------------------------------------------------------------


class Cgroup:
    """A cgroup of version 1 for one process."""

    def __init__(self, controller: str, pid: int) -> None:
        inside = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        parent = CGROUPS / controller / inside.get(controller, "/").lstrip("/")
        self.path = parent / f"paceline-matrix-{os.getpid()}-{pid}"
        self.path.mkdir()
        self._parent = parent
        self.pid = pid

    def write(self, file: str, value: object) -> None:
        (self.path / file).write_text(str(value))

    def enter(self) -> None:
        self.write("cgroup.procs", self.pid)

    def close(self) -> None:
        for pid in (self.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (self._parent / "cgroup.procs").write_text(pid)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # a task leaves its cgroup a little after its end
                self.path.rmdir()
                return
            time.sleep(0.05)


def limit_cpu(group: Cgroup, share: float) -> None:
    group.write("cpu.cfs_period_us", 100_000)
    group.write("cpu.cfs_quota_us", round(share * 100_000))


def limit_memory(group: Cgroup, folder: Path) -> None:
    """Leave less room than the worker's files need, so that its pages are read from the disk again and again."""
    drop_from_cache(folder / "data")
    used = re.search(r"^rss (\d+)", (group.path / "memory.stat").read_text(), re.MULTILINE)
    assert used is not None
    group.write("memory.limit_in_bytes", int(used[1]) + (40 << 20))


def drop_from_cache(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def neighbours(pids: Sequence[int], slow: int) -> Iterator[None]:
    """The slow worker shares processor 1 with eight others; the rest has processor 0."""
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(task), {1 if pid == slow else 0})
    with busy(8) as spinning:
        for one in spinning:
            os.sched_setaffinity(one.pid, {1})
        yield


@contextlib.contextmanager
def stops(pid: int) -> Iterator[None]:
    done = threading.Event()

    def run() -> None:
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(pid, signal.SIGSTOP)
                done.wait(1.0)
                os.kill(pid, signal.SIGCONT)
                if done.wait(2.0):
                    return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def limited(fault: str, job: LocalJob, stack: contextlib.ExitStack) -> Cgroup | None:
    """Return a cgroup around the process that will be short of something."""
    if fault not in ("quota", "server", "memory"):
        return None
    pid = job.servers[0].pid if fault == "server" else job.workers[SLOW].pid
    group = Cgroup("memory" if fault == "memory" else "cpu", pid)
    stack.callback(group.close)
    group.enter()
    return group


def outside(fault: str, job: LocalJob, folder: Path) -> contextlib.AbstractContextManager[object]:
    """Return the fault that begins when it is entered."""
    slow = job.workers[SLOW].pid
    if fault == "link":
        assert isinstance(job, HostsJob)
        job.host_of("worker", SLOW).run("tc qdisc add dev eth0 root tbf rate 20mbit burst 128kb latency 500ms")
    if fault == "delay":
        (folder / f"host-{SLOW}" / "slow").touch()
    if fault.startswith("crowd"):
        return busy(int(fault[5:]))
    if fault == "neighbour":
        return neighbours([one.pid for one in (*job.workers, *job.servers, job.scheduler)], slow)
    return stops(slow) if fault == "stops" else contextlib.nullcontext()


# ---- a slow way to the other hosts -----------------------------------------------------------------------------------

_RELAY_PORT, _MARK, _SO_ORIGINAL_DST = 9999, 7, 80
DELAY_S = 0.04


def start_relay(host: NamespaceHost, stack: contextlib.ExitStack, folder: Path) -> None:
    """Let all connections of a host go through a relay, which delays them once a file ``slow`` is in the folder.

    All hosts have one: its own time is no difference between them. It waits for no processor, as no network does.
    """
    unmarked = f"-p tcp -d 10.77.0.0/24 -m mark ! --mark {_MARK}"
    host.run(f"iptables -t nat -A OUTPUT {unmarked} -j REDIRECT --to-ports {_RELAY_PORT}")
    argv = host.command([sys.executable, "-m", "tests.observe.matrix", "--relay", str(folder)])
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    os.setpriority(os.PRIO_PROCESS, process.pid, -20)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    process.stdout.readline()


async def relay(slow: Path) -> None:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = writer.get_extra_info("socket").getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
        port, address = struct.unpack("!2xH4s8x", found)
        upstream = socket.socket()
        upstream.setblocking(False)
        upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the true connection has it
        upstream.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, _MARK)
        await asyncio.get_running_loop().sock_connect(upstream, (socket.inet_ntoa(address), port))
        upstream_reader, upstream_writer = await asyncio.open_connection(sock=upstream)
        await asyncio.gather(_copy(reader, upstream_writer, slow), _copy(upstream_reader, writer, slow))

    server = await asyncio.start_server(take, "0.0.0.0", _RELAY_PORT)
    print("ready", flush=True)
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: Path) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            loop.call_later(DELAY_S if slow.exists() else 0.0, writer.write, data)
    loop.call_later(2 * DELAY_S, writer.close)


# ---- trials ----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The verdicts of a job."""

    said: list[tuple[int, str]] = field(default_factory=list)
    """Rounds since the onset, and the line."""
    rounds: int = 0

    def judge(self, fault: str) -> str:
        """Return ``right``, ``wrong``, ``none``; of a job without a fault ``right`` where nothing was said."""
        lines = [line for _, line in self.said if " again, from round" not in line]
        if not RIGHT[fault]:
            return "wrong" if lines else "right"
        if not lines:
            return "none"
        who = "server 0 " if fault == "server" else f"worker {SLOW} "
        is_right = who in lines[0] and any(cause in lines[0] for cause in RIGHT[fault])
        return "right" if is_right and self.said[0][0] >= 0 else "wrong"


class _Recorded(LocalJob):
    recording: Path | None = None

    def _placed(self, role: str, rank: int, argv: Sequence[str]) -> Sequence[str]:
        argv = super()._placed(role, rank, argv)
        return recorded(argv, self.recording) if role == "scheduler" and self.recording else argv


class _RecordedHosts(HostsJob):
    recording: Path | None = None

    def _placed(self, role: str, rank: int, argv: Sequence[str]) -> Sequence[str]:
        argv = recorded(argv, self.recording) if role == "scheduler" and self.recording else argv
        return super()._placed(role, rank, argv)


def recorded(argv: Sequence[str], path: Path) -> list[str]:
    """Return the command of a scheduler that writes down all accounts."""
    return [sys.executable, "-m", "tests.observe.matrix", "--scheduler", str(path)]


def run_scheduler(path: str) -> None:
    """Be a scheduler that writes every account down, a line of JSON each."""
    from paceline.membership.accounts import Verdicts

    note, file = Verdicts.note, Path(path).open("a", buffering=1)  # noqa: SIM115 - until the end of the process

    def noted(self: Any, member: Any, account: Any, *more: Any) -> Any:
        found = note(self, member, account, *more)
        windows = [[one.round, one.rounds, one.samples, list(one.parts), one.way] for one in account.windows]
        line = [member.role, member.rank, member.host, windows, list(account.host), [list(one) for one in account.late]]
        file.write(json.dumps([*line, [one.text for one in found]]) + "\n")
        return found

    Verdicts.note = noted  # type: ignore[method-assign]
    sys.argv = ["paceline", "scheduler"]
    runpy.run_module("paceline", run_name="__main__")


def rounds_of(folder: Path) -> int:
    """Return the last round of the worker that is furthest."""
    found = [path.read_text().strip() for path in folder.glob("round-*")]
    return max((int(one) for one in found if one), default=-1)


def run(fault: str, jitter: float, folder: Path, options: argparse.Namespace) -> Outcome:
    """Run one job."""
    folder.mkdir(parents=True, exist_ok=True)
    outcome = Outcome()
    rounds = options.rounds or ONSET + AFTER
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(_job(fault, stack, folder, options.record))
        job.start_all(train, fault, jitter, rounds, str(folder), options.compute)
        group = limited(fault, job, stack)
        while rounds_of(folder) < ONSET and not ended(job):
            _look(job, folder, outcome)
        if group is not None and fault == "memory":
            limit_memory(group, folder)
        elif group is not None:
            limit_cpu(group, 0.01 if fault == "server" else 0.5 * options.compute / (options.compute + 0.055))
        stack.enter_context(outside(fault, job, folder))
        while not ended(job) and not (RIGHT[fault] and outcome.said):
            _look(job, folder, outcome)
        outcome.rounds = rounds_of(folder)
        if any(one.code not in (None, 0) for one in job.workers):
            print(job.report())
    return outcome


def ended(job: LocalJob) -> bool:
    return any(one.code is not None for one in job.workers)


def _look(job: LocalJob, folder: Path, outcome: Outcome) -> None:
    time.sleep(0.02)
    lines = [
        line
        for line in job.scheduler.output.splitlines()
        if re.search(r"takes [\d.]+ times|holds the|again, from", line)
    ]
    outcome.said += [(rounds_of(folder) - ONSET, line) for line in lines[len(outcome.said) :]]


def _job(fault: str, stack: contextlib.ExitStack, folder: Path, is_recorded: bool) -> _Recorded | _RecordedHosts:
    settings = {"check_rules": False}
    job: _Recorded | _RecordedHosts
    if fault in ("link", "delay"):
        hosts = stack.enter_context(Hosts(WORKERS))
        if fault == "delay":
            for host in range(WORKERS):
                (folder / f"host-{host}").mkdir()
                start_relay(hosts[host], stack, folder / f"host-{host}")
        job = _RecordedHosts(hosts, [1] * WORKERS, [1, 0, 0, 0], **settings)
    else:
        job = _Recorded(WORKERS, 1, **settings)
    job.recording = folder / "accounts.jsonl" if is_recorded else None
    return job


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.observe.matrix", description=__doc__)
    parser.add_argument("--faults", nargs="*", default=[one for one in RIGHT if not one.startswith("crowd")])
    parser.add_argument("--jitter", nargs="*", type=float, default=[0.0, 0.1, 0.3])
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--compute", type=float, default=0.02)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    done: dict[tuple[str, float], list[Outcome]] = {}
    for trial in range(options.trials):
        for fault in options.faults:
            if fault in ("link", "delay") and why_no_hosts():
                print(f"{fault}: {why_no_hosts()}")
                continue
            for jitter in options.jitter:
                outcome = run(fault, jitter, options.folder / f"{fault}-{jitter}-{trial}", options)
                done.setdefault((fault, jitter), []).append(outcome)
                print(fault, jitter, outcome.judge(fault), outcome.rounds, *outcome.said, sep="  ", flush=True)
    table = Table("fault", "jitter", "trials", "right", "wrong", "nothing said", "rounds to the verdict")
    for (fault, jitter), outcomes in done.items():
        found = [one.judge(fault) for one in outcomes]
        late = [one.said[0][0] for one in outcomes if RIGHT[fault] and one.judge(fault) == "right"]
        shown = f"{statistics.median(late):g} ({min(late)}-{max(late)})" if late else "-"
        counts = [str(found.count(one)) for one in ("right", "wrong", "none")]
        table.add_row(fault, f"{jitter:.0%}", str(len(outcomes)), *counts, shown)
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--scheduler"]:
        run_scheduler(sys.argv[2])
    elif sys.argv[1:2] == ["--relay"]:
        asyncio.run(relay(Path(sys.argv[2], "slow")))
    else:
        sys.exit(main())
