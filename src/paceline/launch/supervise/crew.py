"""The processes of one job and the pipes on which they print."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from paceline.launch.plan import Member
from paceline.launch.supervise import sessions
from paceline.launch.supervise.child import Child
from paceline.launch.supervise.console import ERR, OUT, Console

_READ_BYTES = 64 * 1024
_DRAIN_READS = 64

_WORKERS_FIRST = {"worker": 0, "server": 1, "scheduler": 2}


class Crew:
    """Starts processes, shows their output, notices their exits and signals them.

    Args:
        selector: gets a callable as the data of every pipe; the loop calls it when the pipe can be read.
        console: where output goes.
        register: called in every new process before it becomes its command.
    """

    def __init__(self, selector: selectors.BaseSelector, console: Console, register: Callable[[], None]) -> None:
        self._selector = selector
        self._console = console
        self._register = register
        self._children: dict[Member, Child] = {}
        self._running: set[Member] = set()
        self._open: dict[tuple[Member, int], int] = {}

    def start(self, member: Member, argv: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = ()) -> None:
        """Start one process.

        Raises:
            LaunchError: it cannot be started.
        """
        child = Child(argv, env, self._register, pass_fds)
        self._children[member] = child
        self._running.add(member)
        for stream, fd in zip((OUT, ERR), child.pipes(), strict=True):
            self._open[member, stream] = fd
            self._selector.register(fd, selectors.EVENT_READ, partial(self._read, member, stream))

    def ended(self) -> list[tuple[Member, int]]:
        """Return the processes that have exited since the last call, with exit codes.

        Of several at once workers come first: they are the likelier cause, and servers exit because of them.
        """
        ended = [member for member in self._running if self._children[member].ended()]
        self._running.difference_update(ended)
        ended.sort(key=lambda member: (_WORKERS_FIRST.get(member.role, 3), member.rank))
        return [(member, self._children[member].code or 0) for member in ended]

    def stopped(self) -> frozenset[Member]:
        """Return the running processes that are stopped."""
        found = sessions.stopped()
        return frozenset(member for member in self._running if self._children[member].pid in found)

    def send(self, signum: int, members: Collection[Member]) -> None:
        """Signal some processes and everything they started."""
        sessions.send(signum, {self._children[member].pid for member in members})

    def living(self) -> list[Member]:
        """Return the processes that still run or left something running behind."""
        alive = sessions.living({child.pid for child in self._children.values()})
        return [member for member, child in self._children.items() if child.pid in alive]

    def close(self) -> None:
        """Show what the pipes still hold, then close pipes and release processes. Does not wait."""
        for member, stream in list(self._open):
            for _ in range(_DRAIN_READS):
                if not self._read(member, stream):
                    break
            self._close(member, stream)
        for child in self._children.values():
            child.release()

    def _read(self, member: Member, stream: int) -> bool:
        """Show the next bytes; return whether there were any."""
        if (member, stream) not in self._open:
            return False
        try:
            data = os.read(self._open[member, stream], _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._console.feed(member, stream, data)
        else:  # the process closed this stream; it may still run
            self._close(member, stream)
        return bool(data)

    def _close(self, member: Member, stream: int) -> None:
        fd = self._open.pop((member, stream), None)
        if fd is not None:
            self._selector.unregister(fd)
            self._console.close(member, stream)
