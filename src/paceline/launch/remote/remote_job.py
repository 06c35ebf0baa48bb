"""A job on several hosts, supervised from here."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.errors import LaunchError
from paceline.launch.backends import Backend
from paceline.launch.plan import Late
from paceline.launch.preflight import check_program
from paceline.launch.remote.remote_crew import LOST_CODE, HostsAbsentError, RemoteCrew
from paceline.launch.remote.request import RemoteRequest
from paceline.launch.supervise.child import die_with_parent
from paceline.launch.supervise.supervisor import SupervisedJob
from paceline.naming import listed

if TYPE_CHECKING:
    from paceline.launch.remote.shell import Broker  # a program, too: no module that runs before it may import it


class RemoteJob(SupervisedJob):
    """A job on several hosts; it runs while :meth:`wait` does."""

    def __init__(self, request: RemoteRequest) -> None:
        super().__init__(request.plan, partial(RemoteCrew, request=request))
        self._remote = request

    def wait(self) -> int:
        """Copy the launcher's directory, if that is asked for, then run the job and return its exit code."""
        failed = [f"host {host}: {why}" for host, why in copy_all(self._remote.copies).items()]
        if failed:
            raise LaunchError(f"the directory could not be copied: {'; '.join(failed)}")
        return super().wait()

    def run_once(self, known: Mapping[Late, str]) -> tuple[int, bool]:
        """Run the job once. When it starts again, hosts that do not come back in time are left out."""
        if known[Late.RESTART] == "0":
            return super().run_once(known)
        while True:
            self.make_crew = partial(RemoteCrew, request=self._remote, waits=True)
            try:
                return super().run_once(known)
            except HostsAbsentError as error:
                self._leave_out(error)

    def _leave_out(self, absent: HostsAbsentError) -> None:
        if self._remote.without is None:
            raise absent
        names = listed(absent.hosts)
        try:
            self._remote = self._remote.without(absent.hosts)
        except ValueError as why:
            raise LaunchError(f"{absent}; the job cannot go on without {names}: {why}") from absent
        self.plan = self._remote.plan
        where = listed(host.name for host in self.plan.hosts)
        print(f"[launch] {absent}; the job goes on without {names}, on {where}", file=sys.stderr, flush=True)


class BrokeredJob(RemoteJob):
    """A job whose remote shells reach the engine's processes through a broker, which ends with the job."""

    def __init__(self, request: RemoteRequest, broker: Broker) -> None:
        self._broker = broker
        super().__init__(replace(request, command=broker.located(request.command)))

    def wait(self) -> int:
        """Run the job and return its exit code."""
        try:
            return super().wait()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the broker, and so all processes of the job."""
        self._broker.close()


class AgentBackend(Backend[RemoteRequest]):
    """A backend that starts an agent per host with a program of this machine.

    Attributes:
        package: the package that has the program.
    """

    package: str
    reads = frozenset({"hosts", "slots"})

    def render(self, request: RemoteRequest) -> str:
        """Return the processes and the commands that reach their hosts."""
        return request.text

    def check(self, request: RemoteRequest) -> None:
        """Look for the program."""
        check_program(request.command(request.plan.hosts[0])[0], self.package)

    def submit(self, request: RemoteRequest) -> RemoteJob:
        """Return the job, which runs while its ``wait`` does."""
        return RemoteJob(request)


def copy_all(copies: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Run the command of each host, side by side; return why those failed that did, by host."""
    return {host: _why(said, code) for host, code, said in run_all(copies) if code}


def run_all(commands: Mapping[str, Sequence[str]], limit_s: float | None = None) -> Iterator[tuple[str, int, str]]:
    """Run the command of each host, side by side; give the host, exit code and output of one after the other.

    One that takes longer than the limit is killed; None: the commands have limits of their own.
    """
    until = None if limit_s is None else time.monotonic() + limit_s
    running = {
        host: subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - the launcher has one thread
        )
        for host, command in commands.items()
    }
    try:
        for host, process in running.items():
            try:
                said, _ = process.communicate(timeout=None if until is None else max(0.2, until - time.monotonic()))
                yield host, process.returncode, said.decode(errors="replace")
            except subprocess.TimeoutExpired:
                process.kill()
                yield host, LOST_CODE, f"no answer within {limit_s:g} s"
    except BaseException:  # a signal has ended the launch
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        raise


def _why(errors: str, code: int) -> str:
    if "rsync: command not found" in errors or "rsync: not found" in errors or code == 127:
        return "the program 'rsync' is missing there; install the package rsync"
    lines = [line for line in errors.splitlines() if line.strip() and not line.startswith("rsync error")]
    return f"{lines[-1] if lines else 'no word'} (exit code {code})"
