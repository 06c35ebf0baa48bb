"""The backend that runs a whole job on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping

from paceline.errors import LaunchError
from paceline.launch.environment import OWNED
from paceline.launch.hosts import LOCALHOST
from paceline.launch.options import backend_options
from paceline.launch.plan import JobPlan, Late
from paceline.launch.planner import Machine, make_plan
from paceline.launch.preflight import check_command
from paceline.launch.render import describe
from paceline.launch.spec import JobSpec
from paceline.net.security import new_job_key


class SupervisedJob:
    """A job on this machine; it runs while :meth:`wait` does.

    Args:
        plan: what to run.
    """

    def __init__(self, plan: JobPlan) -> None:
        self._plan = plan
        self.id = plan.job_id

    def wait(self) -> int:
        """Run the job and return its exit code."""
        from paceline.launch.supervise.again import run_again  # only here: a dry run does not need it
        from paceline.launch.supervise.supervisor import Supervisor, local_crew

        environ = {name: value for name, value in os.environ.items() if name not in OWNED}

        def make(restart: int) -> Supervisor:
            known = {Late.BIND: f"tcp://{LOCALHOST}:0", Late.RESTART: str(restart)}
            if self._plan.needs(Late.JOB_KEY):
                known[Late.JOB_KEY] = new_job_key()
            return Supervisor(self._plan, known, located, local_crew(environ))

        return run_again(make, self._plan.max_restarts)

    def cancel(self) -> None:
        """Do nothing: the job ends with :meth:`wait`."""

    def logs(self) -> Iterator[str]:
        """Give nothing: :meth:`wait` has shown everything."""
        return iter(())


class LocalBackend:
    """Every process is a child of the launcher."""

    def plan(self, spec: JobSpec, machine: Machine) -> JobPlan:
        """Place everything on this machine.

        Raises:
            ValueError: see :func:`~paceline.launch.make_plan`; or there is an option, or a copy of a directory.
        """
        backend_options("local", {}, spec.options)
        if spec.sync:
            raise ValueError("--sync-dst-dir copies to other hosts, and this job has none: name them with -H")
        return make_plan(spec, machine)

    def render(self, request: JobPlan) -> str:
        """Return the processes and their environment."""
        return describe(request)

    def check(self, request: JobPlan) -> None:
        """Refuse processes for other hosts and commands that do not exist.

        Raises:
            LaunchError: what is wrong, and what would be right.
        """
        for process in request:
            if process.host not in (LOCALHOST, "localhost"):
                raise LaunchError(
                    f"{process.member} is placed on {process.host}; launcher 'local' runs on this machine only"
                )
            check_command(process.argv, os.environ | {k: v for k, v in process.env.items() if isinstance(v, str)})

    def submit(self, request: JobPlan) -> SupervisedJob:
        """Return the job, which runs while its ``wait`` does.

        Raises:
            LaunchError: see :meth:`check`; nothing has been started.
        """
        self.check(request)
        return SupervisedJob(request)


def located(scheduler: str | None) -> Mapping[Late, str]:
    """Return what follows from the scheduler's address (None: there is none), and a port for torch.distributed."""
    return {Late.MASTER_PORT: str(free_port())} | (address_parts(scheduler) if scheduler is not None else {})


def address_parts(scheduler: str) -> dict[Late, str]:
    """Return the late values that follow from the scheduler's address, ``tcp://host:port``."""
    host, _, port = scheduler.removeprefix("tcp://").rpartition(":")
    return {Late.SCHEDULER: scheduler, Late.SCHEDULER_HOST: host.strip("[]"), Late.SCHEDULER_PORT: port}


def free_port() -> int:
    """Return a TCP port that is free now. It may be taken before it is bound."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
