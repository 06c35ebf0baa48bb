"""Faults that come to a real job from outside: cgroups, busy processors, stops, and slow ways between hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.testing import LocalJob
from tests.busy.load import busy
from tests.clusters.hosts import HostsJob, NamespaceHost
from tests.observe.faulty_worker import SLOW

CGROUPS = Path("/sys/fs/cgroup")


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
    argv = host.command([sys.executable, "-m", "tests.observe.faults", str(folder)])
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


if __name__ == "__main__":
    asyncio.run(relay(Path(sys.argv[1], "slow")))
