"""The backend that runs a job on hosts which the user reaches with ssh, where rsync copies the launcher's directory."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.errors import LaunchError
from paceline.launch.backends import typed_options
from paceline.launch.host_list import Host
from paceline.launch.job_spec import JobSpec
from paceline.launch.planner import Machine, make_plan
from paceline.launch.preflight import command_words
from paceline.launch.remote import AgentBackend, RemoteRequest, remote_request, without_hosts

#: What never belongs to a copy.
_EXCLUDED = ("__pycache__", ".git", ".venv", "*.pyc")

#: Longest time without a byte of a copy, in seconds: a busy host may need a while to begin.
_SILENT_S = 300

#: No prompt can be answered, no terminal is needed, and forwarded ports of the user's configuration would collide. Nor
#: may it say what runs, without its stdin or in the background. An older ssh does not know all of these options.
_SSH_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "ForwardX11=no", "-o", "RemoteCommand=none"),
    *("-o", "IgnoreUnknown=*", "-o", "SessionType=default", "-o", "StdinNull=no"),
    *("-o", "ForkAfterAuthentication=no"),
)


@dataclass(frozen=True)
class SshOptions:
    """Options of the backend ``ssh``."""

    ssh: str = "ssh"
    """Command that reaches a host, as in ``ssh -F FILE -i KEY``."""
    python: str = ""
    """Interpreter on the hosts; empty: the launcher's if they have it, else ``python3``."""


class SshBackend(AgentBackend):
    """Starts an agent per host with the OpenSSH client; the user's configuration counts."""

    package = "openssh-client"
    reads = AgentBackend.reads | {"sync"}

    def plan(self, spec: JobSpec, machine: Machine) -> RemoteRequest:
        """Deal the processes to the hosts."""
        options = typed_options("ssh", SshOptions, spec.options)
        plan = make_plan(spec, machine)
        ssh = command_words("-o ssh", options.ssh)
        here = dict(machine.environ)
        if spec.sync:
            here["PYTHONPATH"] = _path_of_copy(here.get("PYTHONPATH", ""), machine.directory, plan.directory)

        there = replace(machine, environ=here)
        request = remote_request(plan, there, options.python, partial(over_ssh, ssh))
        request = replace(request, without=lambda names: self.plan(without_hosts(spec, names), machine))
        if not spec.sync:
            return request
        inside = os.path.relpath(plan.directory, machine.directory)  # a copy of this directory in itself would grow
        never = [] if inside.split(os.sep)[0] in (os.curdir, os.pardir) else [f"/{inside}"]
        copies = {host.name: rsync_command(_options(ssh, host), host, plan.directory, never) for host in plan.hosts}
        return replace(request, copies=copies)

    def check(self, request: RemoteRequest) -> None:
        """Look for the programs that are needed here."""
        super().check(request)
        if request.copies and shutil.which("rsync") is None:
            raise LaunchError(
                "--sync-dst-dir needs the program 'rsync' here and on every host; install the package rsync"
            )


def over_ssh(ssh: Sequence[str], host: Host, words: Sequence[str]) -> list[str]:
    """Return the command that runs another one on a host, whatever the user's shell there is."""
    return [*_options(ssh, host), host.name, for_any_shell(words)]


def for_any_shell(words: Sequence[str]) -> str:
    """Return a command that sh, csh and fish read alike: csh has no line feed or ``!`` in quotes, fish no backslash."""
    text = shlex.join(words)
    if text.isprintable() and not re.search(r"[\\!]", text):
        return text
    coded = "".join(
        chr(one) if re.match(r"[\w ./=:;,-]", chr(one), re.ASCII) else f"\\0{one:03o}" for one in os.fsencode(text)
    )
    return shlex.join(["sh", "-c", 'eval "$(printf %b "$0")"', coded])


def _options(ssh: Sequence[str], host: Host) -> list[str]:
    """Return the words of a command that reaches a host, without its name."""
    return [*ssh, *_SSH_OPTIONS, *(["-p", str(host.port)] if host.port else [])]


def _path_of_copy(path: str, here: str, there: str) -> str:
    """Return PYTHONPATH for a copy of the launcher's directory: parts of it are parts of the copy, then itself."""
    parts = []
    for part in path.split(os.pathsep) if path else []:
        relative = os.path.relpath(part, here)
        parts.append(part if relative.startswith("..") else os.path.normpath(os.path.join(there, relative)))
    return os.pathsep.join(dict.fromkeys([*parts, there]))


def rsync_command(ssh: Sequence[str], host: Host, directory: str, never: Sequence[str] = ()) -> list[str]:
    """Return the command that copies the working directory to a host, without ``never``; nothing there is deleted."""
    excluded = [f"--exclude={name}" for name in (*_EXCLUDED, *never)]
    name = f"[{host.name}]" if ":" in host.name else host.name
    options = ["-az", "--mkpath", f"--timeout={_SILENT_S}", *excluded, "-e", shlex.join(ssh)]
    return ["rsync", *options, "./", f"{name}:{directory}/"]
