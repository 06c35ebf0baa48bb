"""A request for a job on several hosts: how its agents are started, and why one has ended."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.launch.host_list import Host
from paceline.launch.job_spec import JobSpec
from paceline.launch.plan import JobPlan, describe
from paceline.launch.planner import Machine
from paceline.launch.process_environment import OWNED
from paceline.launch.remote.agent_link import AgentLink

HostCommand = Callable[[Host], Sequence[str]]
"""Gives the command that runs an agent on a host."""

Explain = Callable[[Host, AgentLink], str]
"""Says in one sentence why a remote shell ended, and what to do."""

#: Exit codes of the script below.
NO_DIRECTORY, NO_PYTHON = 91, 92

#: Its first word is a sign of life: on a busy host Python takes long to start. It is one line: csh takes no more.
_SCRIPT = (
    f'echo; cd "$1" || exit {NO_DIRECTORY}; test -z "$2" || export PYTHONPATH="$2"; shift 2; for python in "$@"; do '
    'if command -v "$python" >/dev/null 2>&1; then exec "$python" -P -m paceline agent; fi; done; '
    f'echo "not found: $*" >&2; exit {NO_PYTHON}'
)

#: Variables of the launcher's shell that processes on other hosts get as well: these, and those with the prefixes.
_FORWARDED = frozenset({"LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ"})
_PREFIXES = (
    "PACELINE_", "MXNET_", "PS_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMBA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_",
    "PYTHON", "CUBLAS_", "HF_", "WANDB_", "AWS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy",
    "https_proxy", "all_proxy", "no_proxy",
)  # fmt: skip


def agent_script(given: str, own: str, directory: str, pythonpath: str) -> list[str]:
    """Return the command that runs an agent in a directory. It has no secrets: they travel on the agent's stdin.

    The interpreter is the one that the user names, else the launcher's own if the host has it, else ``python3``.
    """
    return ["sh", "-c", _SCRIPT, "paceline", directory, pythonpath, *([given] if given else [own, "python3", "python"])]


def agent_here(python: str = "") -> list[str]:
    """Return the command that runs an agent in this directory, with an interpreter that the user names or this one."""
    return agent_script(python, sys.executable, os.getcwd(), os.environ.get("PYTHONPATH", ""))


def forwarded(environ: Mapping[str, str], owned: frozenset[str] = OWNED) -> dict[str, str]:
    """Return the variables of the launcher's shell that go to other hosts, without those that the launcher sets."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in _FORWARDED or name.startswith(_PREFIXES)) and name not in owned
    }


#: Variables that every host has for itself.
_OF_HOST = frozenset({
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "PWD", "OLDPWD", "HOSTNAME", "TERM", "TMPDIR", "TMP", "TEMP", "MAIL",
    "_", "SHLVL", "DISPLAY", "EDITOR", "PAGER", "COLUMNS", "LINES", "VIRTUAL_ENV", "CONDA_PREFIX",
})  # fmt: skip


def kept_back(environ: Mapping[str, str]) -> set[str]:
    """Return the variables of the launcher's shell that neither go to other hosts nor are a host's own."""
    own = {name for name in environ if name in _OF_HOST or name.startswith(("XDG_", "SSH_", "SLURM_"))}
    return set(environ) - set(forwarded(environ)) - own - OWNED


_KNOWN = (
    ("Could not resolve hostname", "is unknown: check its name in the hosts file or in ~/.ssh/config"),
    ("Host key verification failed", "has a host key that ssh does not know: connect once by hand with `ssh {host}`"),
    ("Permission denied", "refused your ssh key: install it with `ssh-copy-id {host}`, and load it with `ssh-add`"),
    ("Too many authentication failures", "refused your ssh keys: name one with IdentityFile in ~/.ssh/config"),
    ("Connection refused", "has no ssh server at that port: start sshd there, or give the port as {host}:PORT; "
     "how many workers it has is slots=N"),
    ("timed out", "did not answer: is it up, and does a firewall let ssh through?"),
    ("No route to host", "cannot be reached: is it up, and in this network?"),
    ("Network is unreachable", "cannot be reached: this machine has no route to its network"),
    (
        "No module named paceline",
        "has Python but not paceline: install it there (pip install paceline), or give its interpreter with "
        "-o python=PATH, or copy this directory with --sync-dst-dir",
    ),
    (
        "which paceline needs",
        "lacks a package: install it there, or give another interpreter with -o python=PATH",
    ),
    ("No module named 'paceline", "has an older paceline than this machine: install the same version there"),
    ("unknown command 'agent'", "has an older paceline than this machine: install the same version there"),
)  # fmt: skip


def explain(host: Host, link: AgentLink) -> str:
    """Return why the remote shell to a host ended."""
    text = "\n".join(link.errors)
    for sign, meaning in _KNOWN:
        if sign in text:
            return f"host {host.name} {meaning.format(host=host.name)} ({_last(link)})"
    if link.about:
        if link.code is None:
            return f"host {host.name} fell silent: is it up, and the network between?"
        return f"the connection to host {host.name} ended: {_last(link) or f'exit code {link.code}'}"
    if link.code == NO_DIRECTORY:
        return (
            f"host {host.name} does not have this directory ({_last(link)}): share it, or copy it there with "
            "--sync-dst-dir DIR"
        )
    if link.code == NO_PYTHON:
        return f"host {host.name} has no such Python ({_last(link)}): install it there, or name one: -o python=PATH"
    return f"host {host.name} did not start an agent (exit code {link.code}): {_last(link) or link.noise or 'no word'}"


def _last(link: AgentLink) -> str:
    """Return the last line with words: mpirun draws rules around its own."""
    lines = [re.sub(r"\s+", " ", line) for line in link.errors if any(map(str.isalnum, line))]
    return lines[-1] if lines else ""


@dataclass(frozen=True)
class RemoteRequest:
    """A job for a backend with agents."""

    plan: JobPlan
    python: str
    """The launcher's interpreter."""
    command: HostCommand
    """Gives the command that runs an agent on a host."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables of every process, besides its agent's environment."""
    explain: Explain = explain
    """Says why a remote shell ended."""
    copies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Commands that run before the start, side by side, by host."""
    without: Callable[[Collection[str]], RemoteRequest] | None = None
    """Plans the job again without some hosts, a ``ValueError`` if it does not fit; None: an engine chose the hosts."""

    @property
    def text(self) -> str:
        """The processes, and the commands that reach their hosts."""
        commands = [*self.copies.values(), *(self.command(host) for host in self.plan.hosts)]
        return describe(self.plan, [shlex.join(command) for command in commands], self.environ)


def remote_request(
    plan: JobPlan, machine: Machine, python: str, reach: Callable[[Host, list[str]], list[str]], private: str = ""
) -> RemoteRequest:
    """Return the request of a backend whose engine runs a command on a host: ``reach`` gives its words.

    No other host gets the variable ``private``.
    """
    environ = forwarded(machine.environ, OWNED | {private})
    script = agent_script(python, machine.python, plan.directory, environ.get("PYTHONPATH", ""))
    return RemoteRequest(plan, machine.python, lambda host: reach(host, script), environ)


def without_hosts(spec: JobSpec, names: Collection[str]) -> JobSpec:
    """Return a job that does not use some of its hosts.

    Raises:
        ValueError: none is left, or none of a group that names its hosts.
    """

    def left(hosts: Sequence[Host], whose: str) -> tuple[Host, ...]:
        found = tuple(host for host in hosts if host.name not in names)
        if hosts and not found:
            raise ValueError(f"{whose} has no other host")
        return found

    groups = tuple(replace(one, hosts=left(one.hosts, f"group {one.name}")) for one in spec.groups)
    return replace(spec, hosts=left(spec.hosts, "the job"), groups=groups)
