"""The agent: starts and watches the processes of one host, as the launcher says on stdin."""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import LaunchError, PacelineError
from paceline.host.cores import usable_cores
from paceline.host.interfaces import address_of, address_towards, addresses_for_others
from paceline.host.own_time import OwnTime
from paceline.launch.host_list import LOCALHOST
from paceline.launch.interpreter import check_ddp, with_own_folder
from paceline.launch.plan import Late, ProcessName, ProcessSpec
from paceline.launch.preflight import NOT_FOUND_CODE, CommandNotFoundError, check_command
from paceline.launch.process_environment import own_environ
from paceline.launch.remote import host_checks
from paceline.launch.remote.agent_link import (
    LONGEST_TURN_S,
    MAGIC,
    PING_S,
    SILENCE_S,
    AgentLines,
    encode,
    members,
    text,
)
from paceline.launch.supervise.child import ENDING, SignalPipe
from paceline.launch.supervise.crew import LocalCrew, free_port
from paceline.launch.supervise.events import Event, Exited, NotStarted, Runs, event_of, words_of
from paceline.launch.supervise.guardian import Guardian

#: Says at which address this host is reached, where no ssh does.
ADDRESS_VARIABLE = "PACELINE_AGENT_ADDRESS"

_READ_BYTES = 256 * 1024
#: Check interval for processes that ended ones left running.
_LEFTOVERS_CHECK_S = 0.1
#: The same for the launcher, while it reads nothing.
_BLOCKED_CHECK_MS = 200
#: Variables of a scheduler that name pipes of this process.
_PIPES = {"PACELINE_READY_FD": Late.READY_FD, "PACELINE_ENDED_FD": Late.ENDED_FD}


class LauncherLostError(PacelineError):
    """The launcher is gone."""


class Agent:
    """Serves one launcher on stdin and stdout; processes inherit ``environ``."""

    def __init__(self, in_fd: int, out_fd: int, environ: Mapping[str, str]) -> None:
        self._in_fd, self._out_fd = in_fd, out_fd
        self._environ = dict(environ)
        self._heard_at = time.monotonic()
        self._own_time = OwnTime(self._heard_at, LONGEST_TURN_S)
        self._lines = AgentLines()
        self._said: deque[list[Any]] = deque()
        """Lines of the launcher that are not carried out yet, but for pings."""
        self._is_pinged = False
        self._ended: set[ProcessName] = set()
        self._said_living: list[ProcessName] = []
        self._gone = False
        self._listening: socket.socket | None = None
        for fd in (in_fd, out_fd):
            os.set_blocking(fd, False)
        self._may_go_on = select.poll()
        self._may_go_on.register(in_fd, select.POLLIN)
        self._may_go_on.register(out_fd, select.POLLOUT)

    def run(self) -> int:
        """Serve until the launcher is gone; returns the exit code. Everything that was started has ended then."""
        guardian = Guardian()
        with selectors.DefaultSelector() as selector, SignalPipe() as signals:
            selector.register(self._in_fd, selectors.EVENT_READ, self._listen)
            selector.register(signals.fd, selectors.EVENT_READ, lambda: self._signalled(signals))
            self._crew = LocalCrew(selector, self, guardian.register, self._environ, self._take)
            try:
                self._write(MAGIC + encode("hello", _about()))
                while not self._gone:
                    self._serve(selector)
            except LauncherLostError:
                pass
            finally:
                guardian.close()
                if self._listening is not None:
                    self._listening.close()
        return 0

    def _serve(self, selector: selectors.BaseSelector) -> None:
        timeout = _LEFTOVERS_CHECK_S if self._said_living else PING_S
        for key, _ in selector.select(timeout):
            key.data()
        self._check_heard()
        if self._is_pinged:
            self._is_pinged = False
            self._say("pong")
        while self._said:
            self._obey(self._said.popleft())
        if self._said_living:
            self._say_living()

    def _check_heard(self) -> None:
        now = time.monotonic()
        self._heard_at += self._own_time.lost_s(now)
        if now > self._heard_at + SILENCE_S:
            raise LauncherLostError("the launcher is silent")

    def feed(self, member: ProcessName, stream: int, data: bytes) -> None:
        """Pass on a process's output."""
        self._say("out", *member, stream, text(data))

    def close(self, member: ProcessName, stream: int) -> None:
        """Pass on that a stream has ended."""
        self._say("closed", *member, stream)

    def _signalled(self, signals: SignalPipe) -> None:
        """Check the children. An engine signals all processes; what ends the job is the launcher's business."""
        for signum in signals.read():
            if signum in ENDING:
                self._say("signalled", signum)
        self._crew.check()

    def _listen(self) -> None:
        try:
            more = os.read(self._in_fd, _READ_BYTES)
        except BlockingIOError:
            return
        self._gone = not more
        self._heard_at = time.monotonic()
        for line in self._lines.feed(more):
            if line == ["ping"]:
                self._is_pinged = True
            else:
                self._said.append(line)

    def _obey(self, line: list[Any]) -> None:
        match line:
            case ["environ", dict() as variables]:
                self._environ.update(variables)
                self._crew.inherit(self._environ)
            case ["address", list() as wanted, list() as targets, str() as ports]:
                self._say(*_addresses(wanted, targets, ports))
            case ["facts", str() as witness, str() as ports]:
                self._listening = host_checks.listen(ports)
                self._say("facts", host_checks.facts(witness), self._listening.getsockname()[1])
            case ["reach", list() as targets]:
                self._say("reached", host_checks.reach(targets))
            case ["start", str() as role, int() as rank, list() as argv, dict() as env]:
                self._start(ProcessSpec(role, rank, tuple(argv), env))
            case ["look", list() as given]:
                self._crew.look(members(given))
            case ["status"] | ["ends"]:
                self._crew.tell_scheduler(line)
            case ["pass_on", int() as signum]:
                self._crew.pass_on(signum)
            case ["signal", int() as signum, list() as given]:
                self._crew.send(signum, members(given))
            case _:
                event = event_of(line)
                if isinstance(event, Exited | Runs):
                    self._crew.tell_scheduler(line)
                    return
                raise ValueError(f"{line[0]!r} is not understood: launcher and agent are of different versions")

    def _start(self, process: ProcessSpec) -> None:
        try:
            environ = {**self._environ, **process.environment({})}
            check_command(process.argv, environ)
            check_ddp(process.argv, environ)
        except CommandNotFoundError as error:
            self._take(NotStarted(process.member, str(error), NOT_FOUND_CODE))
        except LaunchError as error:
            self._take(NotStarted(process.member, str(error)))
        else:
            pipes = _PIPES if process.role == "scheduler" else {}
            self._ended.discard(process.member)  # it is started again
            self._crew.start(replace(process, env={**process.env, **pipes}), {})

    def _take(self, event: Event) -> None:
        if isinstance(event, Exited):
            self._ended.add(event.member)
            self._say_living()
        self._say(*words_of(event))

    def _say_living(self) -> None:
        living = [member for member in self._crew.living() if member in self._ended]
        if living != self._said_living:
            self._said_living = living
            self._say("living", living)

    def _say(self, *words: Any) -> None:
        self._write(encode(*words))

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._out_fd, rest) :]
            except BlockingIOError:
                self._wait_to_write()
            except OSError as error:
                raise LauncherLostError(str(error)) from error

    def _wait_to_write(self) -> None:
        """Wait until the launcher reads on, or is gone. A launcher that is paused does not read, but pings."""
        if any(fd == self._in_fd for fd, _ in self._may_go_on.poll(_BLOCKED_CHECK_MS)):
            self._listen()
        if self._gone:
            raise LauncherLostError("the launcher is gone")
        self._check_heard()


def _about() -> dict[str, Any]:
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "python": sys.executable,
        "version": ".".join(map(str, sys.version_info[:3])),
        "cores": usable_cores(),
        "host": socket.gethostname(),
        "addresses": addresses_for_others(),
        "reached_at": os.environ.get(ADDRESS_VARIABLE) or (connection[2] if len(connection) == 4 else ""),
        "clock": time.time(),
        "pid": os.getpid(),
    }


def _addresses(wanted: list[str], targets: list[str], ports: str) -> list[Any]:
    """Return this host's address, on the first interface, else the one from which it reaches a target; a free port."""
    try:
        found, port = [address_of(one) for one in wanted], free_port(ports)
    except PacelineError as error:
        return ["refused", str(error)]
    return ["address", found[0] if found else address_towards(targets) or LOCALHOST, port]


def main() -> int:
    """Run an agent on stdin and stdout."""
    in_fd, out_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what anything prints by mistake is not part of the protocol
    environ = own_environ(os.environ)
    environ.pop(ADDRESS_VARIABLE, None)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return Agent(in_fd, out_fd, with_own_folder(environ)).run()
