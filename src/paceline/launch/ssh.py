"""The backend that runs a job on hosts which the user reaches with ssh."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence

from paceline.errors import LaunchError
from paceline.launch.environment import OWNED
from paceline.launch.hosts import Host
from paceline.launch.options import backend_options
from paceline.launch.planner import Machine, make_plan
from paceline.launch.remote import RemoteJob, RemoteRequest, agent_script, forwarded
from paceline.launch.remote.explain import explain
from paceline.launch.remote.sync import check_rsync, rsync_command, run_all
from paceline.launch.render import describe
from paceline.launch.spec import JobSpec

OPTIONS = {
    "ssh": "command that reaches a host, as in: ssh -F FILE -i KEY",
    "python": "interpreter on the hosts (default: the launcher's if they have it, else python3)",
}

#: No prompt can be answered, no terminal is needed, and forwarded ports of the user's configuration would collide.
_SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "ForwardX11=no")


class SshBackend:
    """Starts an agent per host with the OpenSSH client; the user's configuration counts."""

    def plan(self, spec: JobSpec, machine: Machine) -> RemoteRequest:
        """Deal the processes to the hosts.

        Raises:
            ValueError: see :func:`~paceline.launch.make_plan`; or an unknown option of this backend.
        """
        options = backend_options("ssh", OPTIONS, spec.options)
        plan = make_plan(spec, machine)
        ssh = shlex.split(options.get("ssh", "ssh"))
        environ = forwarded(machine.environ, OWNED)
        if spec.sync:
            environ["PYTHONPATH"] = _path_of_copy(environ.get("PYTHONPATH", ""), machine.directory, plan.directory)
        script = agent_script(options.get("python", ""), machine.python, plan.directory, environ.get("PYTHONPATH", ""))

        def command(host: Host) -> list[str]:
            return [*ssh_command(ssh, host), host.name, shlex.join(script)]

        sync = [rsync_command(ssh_command(ssh, host), host, plan.directory) for host in plan.hosts] if spec.sync else []
        return RemoteRequest(plan, machine.python, command, environ, tuple(map(tuple, sync)))

    def render(self, request: RemoteRequest) -> str:
        """Return the processes and the commands that reach their hosts."""
        return describe(
            request.plan,
            [shlex.join(command) for command in request.sync]
            + [shlex.join(request.command(host)) for host in request.plan.hosts],
            request.environ,
        )

    def check(self, request: RemoteRequest) -> None:
        """Look for the programs that are needed here.

        Raises:
            LaunchError: ssh or rsync is missing.
        """
        check_program(request.command(request.plan.hosts[0])[0], "openssh-client")
        if request.sync:
            check_rsync()

    def submit(self, request: RemoteRequest) -> RemoteJob:
        """Return the job, which runs while its ``wait`` does.

        Raises:
            LaunchError: see :meth:`check`.
        """
        self.check(request)
        names = [host.name for host in request.plan.hosts]
        return RemoteJob(
            request, explain, lambda: run_all(dict(zip(names, request.sync, strict=True)) if request.sync else {})
        )


def ssh_command(ssh: Sequence[str], host: Host) -> list[str]:
    """Return the words of a command that reaches a host, without its name."""
    return [*ssh, *_SSH_OPTIONS, *(["-p", str(host.port)] if host.port else [])]


def check_program(name: str, package: str) -> None:
    """Make sure that a program exists here.

    Raises:
        LaunchError: it does not; with the package to install.
    """
    if shutil.which(name) is None:
        raise LaunchError(f"the program {name!r} is not on the PATH of this machine; install the package {package}")


def _path_of_copy(path: str, here: str, there: str) -> str:
    """Return PYTHONPATH for a copy of the launcher's directory: parts of it are parts of the copy, then itself."""
    parts = []
    for part in path.split(os.pathsep) if path else []:
        relative = os.path.relpath(part, here)
        parts.append(part if relative.startswith("..") else os.path.normpath(os.path.join(there, relative)))
    return os.pathsep.join(dict.fromkeys([*parts, there]))
