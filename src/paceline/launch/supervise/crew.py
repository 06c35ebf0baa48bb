"""The processes of one job, seen from the loop that supervises them."""

from __future__ import annotations

import abc
import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from paceline.config import port_range
from paceline.errors import ConfigError, LaunchError
from paceline.host.descriptors import raise_limit
from paceline.host.exitcodes import PEER_FAILED
from paceline.launch import processes
from paceline.launch.plan import SCHEDULER, Late, ProcessName, ProcessSpec, address_parts
from paceline.launch.supervise.child import FOR_WORKERS, Child
from paceline.launch.supervise.console import ERR, OUT
from paceline.launch.supervise.events import Event, Exited, NotStarted, Runs, Started, Stopped, words_of
from paceline.launch.supervise.ready import EndedPipe, ReadyPipe

_READ_BYTES = 64 * 1024
_DRAIN_READS = 64

_WORKERS_FIRST = {"worker": 0, "server": 1, "scheduler": 2}

#: Ask the scheduler how all members do, whose answer is a ``StatusSaid``; and say that SIGTERM, which comes next, ends
#: the job.
STATUS, ENDS = ("status",), ("ends",)

Take = Callable[[Event], None]


class Output(Protocol):
    """Where the output of processes goes."""

    def feed(self, member: ProcessName, stream: int, data: bytes) -> None:
        """Take bytes that a process wrote."""

    def close(self, member: ProcessName, stream: int) -> None:
        """Take note that a stream has ended."""


class Processes(abc.ABC):
    """Starts processes and signals them; reports their state by events."""

    hears_scheduler = True
    """Whether the scheduler says which process failed first, and whether the others go on without a worker."""

    def opening(self) -> bool:
        """Tell whether processes cannot be started yet.

        Raises:
            LaunchError: they never will; no process has been started.
        """
        return False

    def late(self, scheduler: str | None) -> Mapping[Late, str]:
        """Return the late values that follow from the scheduler's address (None: the job has no scheduler)."""
        return {}

    @abc.abstractmethod
    def start(self, process: ProcessSpec, known: Mapping[Late, str]) -> None:
        """Start a process; the event ``Started`` or ``NotStarted`` follows, now or later."""

    @abc.abstractmethod
    def check(self) -> None:
        """Look for children of this process that have ended or are stopped."""

    @abc.abstractmethod
    def look(self, members: Collection[ProcessName]) -> None:
        """Find out how much CPU time some processes have used; an event ``Runs`` for each follows, now or later."""

    def tell_scheduler(self, words: Sequence[Any]) -> None:  # noqa: B027 - not all crews hear the scheduler
        """Tell the scheduler, if there is one, the words of a line: of an event, or :data:`STATUS` or :data:`ENDS`."""

    @abc.abstractmethod
    def send(self, signum: int, members: Collection[ProcessName]) -> None:
        """Signal some processes and everything they started."""

    def pass_on(self, signum: int) -> bool:
        """Give a signal that ends no job to processes; SIGUSR1 and SIGUSR2 are for workers only. False: it cannot."""
        return False

    def living(self) -> list[ProcessName]:
        """Return the processes that still run or left something running behind."""
        return []

    def deadline(self) -> float | None:
        """Return when :meth:`opening` or :meth:`check` must be called again, on the clock of ``time.monotonic``."""
        return None

    def finish(self) -> None:  # noqa: B027 - nothing to do where all processes are of this host
        """End the processes elsewhere. The guardian ends those of this host."""

    @abc.abstractmethod
    def close(self) -> None:
        """Show the remaining output, and release everything."""


class LocalCrew(Processes):
    """The processes of one job on this host, and the pipes on which they print.

    The loop calls the data of each pipe of the selector that can be read. ``register`` is called in every new process
    before it becomes its command, ``take`` with events.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        output: Output,
        register: Callable[[], None],
        environ: Mapping[str, str],
        take: Take,
    ) -> None:
        raise_limit()  # each process has two pipes
        self._selector, self._output, self._register = selector, output, register
        self._environ, self._take = dict(environ), take
        self._children: dict[ProcessName, Child] = {}
        self._running: set[ProcessName] = set()
        self._open: dict[tuple[ProcessName, int], int] = {}
        self._ready: ReadyPipe | None = None
        self._ended: EndedPipe | None = None

    def inherit(self, environ: Mapping[str, str]) -> None:
        """Set the variables that processes inherit from now on."""
        self._environ = dict(environ)

    def late(self, scheduler: str | None) -> Mapping[Late, str]:
        """Return the parts of the scheduler's address, and a free port for torch.distributed."""
        return {Late.MASTER_PORT: str(free_port()), **address_parts(scheduler)}

    def start(self, process: ProcessSpec, known: Mapping[Late, str]) -> None:
        """Start a process; it has started, or not, when this returns."""
        try:
            if process.role == "scheduler":
                self._start_scheduler(process, known)
            else:
                self._start(process.member, process.argv, process.environment(known))
        except LaunchError as error:
            self._take(NotStarted(process.member, str(error)))
        else:
            self._take(Started(process.member, f"pid {self._children[process.member].pid}"))

    def check(self) -> None:
        """Notice stopped and ended children.

        Of several that ended at once workers come first: they are the likelier cause, and servers exit because of them.
        Processes whose exit code says that they lost another one come last. News of the scheduler come before its end.
        """
        found = processes.stopped({self._children[one].pid for one in self._running})
        self._take(Stopped(frozenset(one for one in self._running if self._children[one].pid in found)))
        ended = [member for member in self._running if self._children[member].ended()]
        self._running.difference_update(ended)
        ended.sort(key=lambda one: (self._children[one].code == PEER_FAILED, _WORKERS_FIRST.get(one.role, 3), one.rank))
        exits = [Exited(member, self._children[member].code or 0) for member in ended]
        for one in exits:
            self._tell(one)
        if exits:
            self._read_ready()
        for one in exits:
            self._take(one)

    def look(self, members: Collection[ProcessName]) -> None:
        """Tell how much CPU time some processes have used, with everything they started."""
        found = processes.usage({self._children[member].pid for member in members})
        for member in members:
            runs = Runs(member, *found.get(self._children[member].pid, processes.Usage()))
            self._tell(runs)
            self._take(runs)

    def tell_scheduler(self, words: Sequence[Any]) -> None:
        """Tell the scheduler, if it runs here."""
        if self._ended is not None:
            self._ended.tell(words)

    def _tell(self, event: Exited | Runs) -> None:
        if event.member != SCHEDULER:
            self.tell_scheduler(words_of(event))

    def send(self, signum: int, members: Collection[ProcessName]) -> None:
        """Signal some processes and everything they started."""
        processes.send(signum, {self._children[member].pid for member in members if member in self._children})

    def pass_on(self, signum: int) -> bool:
        """Give a signal to processes that handle it; SIGTSTP stops the others, SIGCONT continues them."""
        for_all = signum not in FOR_WORKERS
        there = [member for member in self._children if for_all or member.role == "worker"]
        processes.pass_on(signum, {self._children[member].pid for member in there})
        return True

    def living(self) -> list[ProcessName]:
        """Return the processes that still run or left something running behind."""
        alive = processes.living({child.pid for child in self._children.values()})
        return [member for member, child in self._children.items() if child.pid in alive]

    def close(self) -> None:
        """Show the rest in the pipes, then close pipes and release processes. Does not wait."""
        for member in self._children:
            self._let_go(member)
        self._close_ready()
        if self._ended is not None:
            self._ended.close()

    def _let_go(self, member: ProcessName) -> None:
        """Show the rest in the pipes of a process, close them, and release it."""
        for stream in (OUT, ERR):
            for _ in range(_DRAIN_READS):
                if not self._read(member, stream):
                    break
            self._close(member, stream)
        self._children[member].release()

    def _start(
        self, member: ProcessName, argv: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        if member in self._children:  # it is started again
            self.send(signal.SIGKILL, [member])
            self._let_go(member)
        ignored = () if member.role == "worker" else FOR_WORKERS
        child = Child(argv, {**self._environ, **env}, self._register, pass_fds, ignored=ignored)
        self._children[member] = child
        self._running.add(member)
        for stream, fd in zip((OUT, ERR), child.pipes(), strict=True):
            self._open[member, stream] = fd
            self._selector.register(fd, selectors.EVENT_READ, partial(self._read, member, stream))

    def _start_scheduler(self, process: ProcessSpec, known: Mapping[Late, str]) -> None:
        self._ready, self._ended = ready, ended = ReadyPipe(), EndedPipe()
        self._selector.register(ready.fd, selectors.EVENT_READ, self._read_ready)
        try:
            fds = {Late.READY_FD: str(ready.write_fd), Late.ENDED_FD: str(ended.read_fd)}
            env = process.environment({**known, **fds})
            self._start(process.member, process.argv, env, [ready.write_fd, ended.read_fd])
        finally:
            ready.close_write()
            ended.close_read()

    def _read_ready(self) -> None:
        """Take the scheduler's news. If it ends without an address it is about to exit, or misses a deadline."""
        if self._ready is None:
            return
        try:
            for event in self._ready.news():
                self._take(event)
            ended = self._ready.ended
        except ValueError as error:
            ended = True
            self._take(NotStarted(SCHEDULER, str(error)))
        if ended:
            self._close_ready()

    def _close_ready(self) -> None:
        if self._ready is not None:
            self._selector.unregister(self._ready.fd)
            self._ready.close()
            self._ready = None

    def _read(self, member: ProcessName, stream: int) -> bool:
        """Show the next bytes; return whether there were any."""
        if (member, stream) not in self._open:
            return False
        try:
            data = os.read(self._open[member, stream], _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._output.feed(member, stream, data)
        else:  # the process closed this stream; it may still run
            self._close(member, stream)
        return bool(data)

    def _close(self, member: ProcessName, stream: int) -> None:
        fd = self._open.pop((member, stream), None)
        if fd is not None:
            self._selector.unregister(fd)
            self._output.close(member, stream)


def serve(selector: selectors.BaseSelector, limit_s: float, is_over: Callable[[], bool]) -> None:
    """Call the data of files that can be read, until something is over, or the time is."""
    until = time.monotonic() + limit_s
    while not is_over() and (left := until - time.monotonic()) > 0:
        for key, _ in selector.select(min(left, 0.1)):
            key.data()


def free_port(ports: str = "") -> int:
    """Return a TCP port that is free now, of a range the last one: listening processes take the first ones.

    It may be taken before it is bound.

    Raises:
        ConfigError: the range is none, or no port of it is free.
    """
    for port in reversed(port_range(ports)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise ConfigError(f"no port of {ports or 'this host'} is free on {socket.gethostname()}")
