"""The backend that reaches hosts with mpirun: Open MPI's or MPICH's.

One mpirun per host runs an agent there, as ssh would. The workers are no MPI ranks: they find each other through the
scheduler. That way exit codes, output and ends are the same as on every other launcher.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import LaunchError
from paceline.launch.backends import typed_options
from paceline.launch.engines.programs import run_program
from paceline.launch.host_list import LOCALHOST, Host
from paceline.launch.job_spec import JobSpec
from paceline.launch.planner import Machine, make_plan
from paceline.launch.preflight import command_words
from paceline.launch.remote import AgentBackend, RemoteRequest, remote_request, without_hosts

_SIGNS = {"openmpi": ("Open MPI", "OpenRTE", "PRTE"), "mpich": ("HYDRA", "Intel(R) MPI")}


@dataclass(frozen=True)
class MpiOptions:
    """Options of the backend ``mpi``."""

    mpirun: str = "mpirun"
    """The command, and options of its own, as in ``mpirun.openmpi --mca btl_tcp_if_include eth1``."""
    mpi: str = ""
    """``openmpi`` or ``mpich``; empty: what ``mpirun --version`` says."""
    python: str = ""
    """Interpreter on the hosts; empty: the launcher's if they have it, else ``python3``."""


class MpiBackend(AgentBackend):
    """Starts an agent per host with mpirun."""

    package = "openmpi-bin or mpich"

    def plan(self, spec: JobSpec, machine: Machine) -> RemoteRequest:
        """Deal the processes to the hosts. Asks mpirun for its version unless the option ``mpi`` is given."""
        options = typed_options("mpi", MpiOptions, spec.options)
        plan = make_plan(spec, machine)
        mpirun = command_words("-o mpirun", options.mpirun)
        kind = options.mpi or implementation(mpirun)
        if kind not in _SIGNS:
            raise ValueError(f"-o mpi={kind}: it is openmpi or mpich")

        def reach(host: Host, script: list[str]) -> list[str]:
            return [*mpirun_command(mpirun, kind, host), *script]

        request = remote_request(plan, machine, options.python, reach)
        return replace(request, without=lambda names: self.plan(without_hosts(spec, names), machine))


def implementation(mpirun: Sequence[str]) -> str:
    """Return which MPI a command belongs to.

    Raises:
        LaunchError: it does not run, or says something unknown.
    """
    text = run_program([mpirun[0], "--version"], MpiBackend.package)
    for kind, signs in _SIGNS.items():
        if any(sign in text for sign in signs):
            return kind
    said = text.strip().splitlines()
    raise LaunchError(
        f"`{mpirun[0]} --version` says {said[0] if said else 'nothing'!r}, which is neither Open MPI nor MPICH; "
        "give -o mpi=openmpi or -o mpi=mpich"
    )


def mpirun_command(mpirun: Sequence[str], kind: str, host: Host) -> list[str]:
    """Return the words that run one process on a host."""
    here = host.name in (LOCALHOST, "localhost")
    if kind == "mpich":
        return [*mpirun, "-n", "1", *([] if here else ["-hosts", host.name])]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*mpirun, *root, "--oversubscribe", "-np", "1", *([] if here else ["--host", host.name])]
