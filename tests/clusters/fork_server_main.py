"""The program of the forking process of :mod:`tests.clusters.fork_server`, and what its children do first."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from paceline.testing.channel import readable
from tests.clusters.fork_server import MAX_MESSAGE_BYTES, module_folders
from tests.clusters.forked_program import be_program

#: Imported before the first fork: what servers, workers, the scheduler and test files need. The first torch optimizer
#: imports ``torch._dynamo``, which takes as long as torch itself; the first kernel numba, which takes half of that.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "paceline.cli.app",
    "paceline.cli.roles",
    "paceline.server.process",
    "paceline.scheduler.process",
    "paceline.kvstore.dist",
    "paceline.optim",
    "paceline.gluon",
    "paceline.ddp.backend",
    *(f"paceline.compression.kernels.{name}" for name in ("bits", "chunks", "lowrank", "selection")),
    "pytest",
    "paceline.testing",
)

_MAX_FDS = 32
_CLONE_NEWNET = 0x40000000


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a child per task; returns its task and files in a child, None in the forking process at its client's end."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    while True:
        ready = readable([channel.fileno(), wake_read])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_ends(channel)
        if channel.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, _MAX_FDS)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (wake_read, wake_write):
                os.close(fd)
            channel.close()
            return json.loads(data), fds
        _say(channel, pid=pid)
        for fd in fds:
            os.close(fd)


def _report_ends(channel: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _say(channel, pid=ended[0], code=os.waitstatus_to_exitcode(ended[1]))


def _say(channel: socket.socket, **said: int) -> None:
    """Tell the client, unless it has ended: then nobody waits for the word, and the next read says so."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send(json.dumps(said).encode())


def _become(task: dict[str, Any], fds: Sequence[int]) -> None:
    """Set up this process as a task describes: session, network, output, files, environment, arguments."""
    os.setsid()
    os.write(fds[1], b"%d\n" % os.getpid())
    if task["network"]:
        _enter_network(task["network"])
    # Files are moved twice, so that none overwrites another one that is still to be moved.
    free = 3 + max([*fds, *task["fds"], 0])
    moved: list[int] = []
    for fd in fds:
        high = free + len(moved)
        os.dup2(fd, high)
        moved.append(high)
        os.close(fd)
    for high, wanted in zip((moved[0], moved[0], *moved[2:]), (1, 2, *task["fds"]), strict=True):
        os.dup2(high, wanted, inheritable=True)
    for high in moved:
        os.close(high)
    before = module_folders(os.environ)
    os.environ.clear()
    os.environ.update(task["env"])
    os.chdir(task["directory"])
    others = [one for one in sys.path[1:] if one not in before]
    sys.path[:] = [task["directory"], *module_folders(os.environ), *others]
    sys.argv = list(task["argv"])


def _enter_network(file: str) -> None:
    """Enter a network namespace, as ``nsenter --net=FILE`` does."""
    namespace = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), file)
    os.close(namespace)


def main() -> None:
    """Run the forking process, and its children."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    for name in (*PRELOADED, *sys.argv[2:]):
        importlib.import_module(name)
    forked = _serve(channel)
    if forked is not None:
        _become(*forked)
        be_program(lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
