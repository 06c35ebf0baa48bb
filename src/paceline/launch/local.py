"""The backend that runs a whole job on this machine."""

from __future__ import annotations

import os

from paceline.errors import LaunchError
from paceline.launch.backends import Job
from paceline.launch.host_list import LOCALHOST
from paceline.launch.interpreter import check_ddp, with_own_folder
from paceline.launch.job_spec import JobSpec
from paceline.launch.plan import JobPlan, Late, describe
from paceline.launch.planner import Machine, make_plan
from paceline.launch.preflight import check_command
from paceline.launch.process_environment import own_environ


class LocalBackend:
    """Every process is a child of the launcher."""

    reads = frozenset({"hosts", "slots"})

    def plan(self, spec: JobSpec, machine: Machine) -> JobPlan:
        """Place everything on this machine."""
        for name in spec.options:
            raise ValueError(f"launcher 'local' has no options: leave out -o {name}=...")
        return make_plan(spec, machine)

    def render(self, request: JobPlan) -> str:
        """Return the processes and their environment."""
        return describe(request)

    def check(self, request: JobPlan) -> None:
        """Refuse processes for other hosts and commands that do not exist."""
        for process in request:
            if process.host not in (LOCALHOST, "localhost"):
                raise LaunchError(
                    f"{process.member} is placed on {process.host}; launcher 'local' runs on this machine only"
                )
            environ = _environ() | {k: v for k, v in process.env.items() if isinstance(v, str)}
            check_command(process.argv, environ)
            check_ddp(process.argv, environ)

    def submit(self, request: JobPlan) -> Job:
        """Return the job, which runs while its ``wait`` does."""
        from paceline.launch.supervise.crew import LocalCrew  # a dry run does not need it
        from paceline.launch.supervise.supervisor import SupervisedJob

        environ = _environ()
        return SupervisedJob(
            request,
            lambda around: LocalCrew(around.selector, around.console, around.register, environ, around.take),
            {Late.BIND: f"tcp://{LOCALHOST}:0"},
        )


def _environ() -> dict[str, str]:
    return with_own_folder(own_environ(os.environ))
