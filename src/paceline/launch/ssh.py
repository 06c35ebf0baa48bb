"""The backend that runs a job on hosts which the user reaches with ssh, where rsync copies the launcher's directory."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.errors import LaunchError
from paceline.launch.backends import backend_options
from paceline.launch.host_list import Host
from paceline.launch.job_spec import JobSpec
from paceline.launch.planner import Machine, make_plan
from paceline.launch.remote import AgentBackend, RemoteJob, RemoteRequest, remote_request
from paceline.launch.supervise.child import die_with_parent

#: What never belongs to a copy.
_EXCLUDED = ("__pycache__", ".git", ".venv", "*.pyc")

OPTIONS = {
    "ssh": "command that reaches a host, as in: ssh -F FILE -i KEY",
    "python": "interpreter on the hosts (default: the launcher's if they have it, else python3)",
}

#: No prompt can be answered, no terminal is needed, and forwarded ports of the user's configuration would collide.
_SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "ForwardX11=no")


class SshBackend(AgentBackend):
    """Starts an agent per host with the OpenSSH client; the user's configuration counts."""

    package = "openssh-client"

    def plan(self, spec: JobSpec, machine: Machine) -> RemoteRequest:
        """Deal the processes to the hosts."""
        options = backend_options("ssh", OPTIONS, spec.options)
        plan = make_plan(spec, machine)
        ssh = shlex.split(options.get("ssh", "ssh"))
        here = dict(machine.environ)
        if spec.sync:
            here["PYTHONPATH"] = _path_of_copy(here.get("PYTHONPATH", ""), machine.directory, plan.directory)

        def reach(host: Host, script: list[str]) -> list[str]:
            return [*ssh_command(ssh, host), host.name, shlex.join(script)]

        request = remote_request(plan, replace(machine, environ=here), options.get("python", ""), reach)
        sync = [rsync_command(ssh_command(ssh, host), host, plan.directory) for host in plan.hosts] if spec.sync else []
        return replace(request, sync=tuple(map(tuple, sync)))

    def check(self, request: RemoteRequest) -> None:
        """Look for the programs that are needed here."""
        super().check(request)
        if request.sync and shutil.which("rsync") is None:
            raise LaunchError(
                "--sync-dst-dir needs the program 'rsync' here and on every host; install the package rsync"
            )

    def submit(self, request: RemoteRequest) -> SshJob:
        """Return the job, which runs while its ``wait`` does."""
        self.check(request)
        return SshJob(request)


class SshJob(RemoteJob):
    """A job whose hosts get a copy of the launcher's directory first, if that is asked for.

    Args:
        request: the job to run.
    """

    def __init__(self, request: RemoteRequest) -> None:
        super().__init__(request)
        self._copies = dict(zip([host.name for host in request.plan.hosts], request.sync, strict=False))

    def wait(self) -> int:
        """Copy, then run the job and return its exit code.

        Raises:
            LaunchError: a host cannot be used; no process runs.
        """
        run_all(self._copies)
        return super().wait()


def ssh_command(ssh: Sequence[str], host: Host) -> list[str]:
    """Return the words of a command that reaches a host, without its name."""
    return [*ssh, *_SSH_OPTIONS, *(["-p", str(host.port)] if host.port else [])]


def _path_of_copy(path: str, here: str, there: str) -> str:
    """Return PYTHONPATH for a copy of the launcher's directory: parts of it are parts of the copy, then itself."""
    parts = []
    for part in path.split(os.pathsep) if path else []:
        relative = os.path.relpath(part, here)
        parts.append(part if relative.startswith("..") else os.path.normpath(os.path.join(there, relative)))
    return os.pathsep.join(dict.fromkeys([*parts, there]))


def rsync_command(ssh: Sequence[str], host: Host, directory: str) -> list[str]:
    """Return the command that copies the working directory to a host; nothing there is deleted."""
    excluded = [f"--exclude={name}" for name in _EXCLUDED]
    name = f"[{host.name}]" if ":" in host.name else host.name
    return ["rsync", "-az", "--mkpath", *excluded, "-e", shlex.join(ssh), "./", f"{name}:{directory}/"]


def run_all(commands: Mapping[str, Sequence[str]]) -> None:
    """Run one command per host, side by side.

    Raises:
        LaunchError: a command failed; the message names all such hosts.
    """
    running = {
        host: subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - the launcher has one thread
        )
        for host, command in commands.items()
    }
    failed = []
    try:
        for host, process in running.items():
            errors = process.communicate()[1].decode(errors="replace")
            if process.returncode:
                failed.append(f"host {host}: {_why(errors, process.returncode)}")
    except BaseException:  # a signal has ended the launch
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        raise
    if failed:
        raise LaunchError(f"the directory could not be copied: {'; '.join(failed)}")


def _why(errors: str, code: int) -> str:
    if "rsync: command not found" in errors or "rsync: not found" in errors or code == 127:
        return "the program 'rsync' is missing there; install the package rsync"
    lines = [line for line in errors.splitlines() if line.strip() and not line.startswith("rsync error")]
    return f"{lines[-1] if lines else 'no word'} (exit code {code})"
