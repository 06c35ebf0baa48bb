"""The backend that runs a whole job on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from paceline.errors import LaunchError
from paceline.launch.environment import OWNED
from paceline.launch.plan import Late, Plan
from paceline.launch.preflight import check_command
from paceline.launch.spec import LOCALHOST
from paceline.transport.security import new_job_key


class LocalBackend:
    """Every process is a child of the launcher."""

    def check(self, plan: Plan) -> None:
        """Refuse processes for other hosts and commands that do not exist.

        Raises:
            LaunchError: what is wrong, and what would be right.
        """
        for process in plan:
            if process.host not in (LOCALHOST, "localhost"):
                raise LaunchError(
                    f"{process.member} is placed on {process.host}; launcher 'local' runs on this machine only"
                )
            check_command(process.argv, os.environ | {k: v for k, v in process.env.items() if isinstance(v, str)})

    def run(self, plan: Plan) -> int:
        """Run the plan and return the job's exit code.

        Raises:
            LaunchError: see :meth:`check`; nothing has been started.
        """
        from paceline.launch.supervise.supervisor import Supervisor  # only here: a dry run does not need it

        self.check(plan)
        known = {Late.BIND: f"tcp://{LOCALHOST}:0"}
        if plan.needs(Late.JOB_KEY):
            known[Late.JOB_KEY] = new_job_key()
        environ = {name: value for name, value in os.environ.items() if name not in OWNED}
        return Supervisor(plan, known, located, environ).run()


def located(scheduler: str | None) -> Mapping[Late, str]:
    """Return what follows from the scheduler's address (None: there is none), and a port for torch.distributed."""
    known = {Late.MASTER_PORT: str(free_port())}
    if scheduler is not None:
        host, _, port = scheduler.removeprefix("tcp://").rpartition(":")
        known |= {Late.SCHEDULER: scheduler, Late.SCHEDULER_HOST: host, Late.SCHEDULER_PORT: port}
    return known


def free_port() -> int:
    """Return a TCP port that is free now. It may be taken before it is bound."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
