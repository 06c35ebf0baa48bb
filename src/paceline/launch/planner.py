"""Make the job plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.consistency import name_ranks
from paceline.host.cores import usable_cores
from paceline.launch import process_environment as environment
from paceline.launch.host_list import LOCALHOST, Host
from paceline.launch.interpreter import own_python
from paceline.launch.job_spec import JobSpec
from paceline.launch.placing import Placement, place_alone, place_servers, place_workers
from paceline.launch.plan import JobPlan, ProcessSpec, Value
from paceline.launch.worker_groups import WorkerGroup

#: What ``--ddp`` leaves as it is.
_DDP = {
    "equal": "--ddp: init_process_group opens the backend paceline. It stays DDP: the slowest rank sets the pace, if "
    "--shares measured does not change that; asynchronous modes need paceline.DistributedOptimizer",
    "measured": "--ddp --shares measured: init_process_group opens the backend paceline, DistributedSampler deals by "
    "measured speed, and gradients are weighted by samples; asynchronous modes need paceline.DistributedOptimizer",
}


@dataclass(frozen=True)
class Machine:
    """The planner's data about the machine."""

    python: str
    """The interpreter that runs scheduler and servers."""
    cores: Mapping[str, int] = field(default_factory=dict)
    """Usable cores by host, where known."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The launcher's environment, without what others say of its process."""
    directory: str = ""
    """The launcher's working directory."""

    @classmethod
    def here(cls) -> Machine:
        """Describe this machine and process."""
        return cls(sys.executable, {LOCALHOST: usable_cores()}, environment.own_environ(os.environ), os.getcwd())


def make_plan(spec: JobSpec, machine: Machine, *, alone: bool = False) -> JobPlan:
    """Turn a job spec into a job plan. Pure: the same arguments make the same plan.

    Of the launcher's environment the plan repeats only what changes a default (OMP_NUM_THREADS, MASTER_PORT,
    PYTHONUNBUFFERED). The backend passes the rest to each process. With ``alone`` every process has a host of its own,
    named ``ROLE-RANK``, which an engine chooses.

    Raises:
        ValueError: ``spec.env`` sets a variable that gives a process its identity, or the workers do not fit.
    """
    for name in sorted(environment.owned(spec) & _given(spec)):
        raise ValueError(f"{name} is set by the launcher, for each process; it cannot be given")
    places = _workers_alone(spec) if alone else place_workers(spec)
    spec = replace(spec, settings=_settings(spec, [place for _, place in places]))
    dealt = place_alone(spec, "server") if alone else place_servers(spec)
    servers = [_role(spec, machine, "server", rank, place) for rank, place in enumerate(dealt)]
    first = Host("scheduler-0") if alone else spec.hosts[0]
    scheduler = [_role(spec, machine, "scheduler", 0, Placement(first, 0, 1))] if servers else []
    nodes = list(dict.fromkeys(place.host.name for _, place in places))
    python = "" if alone else machine.python
    workers = [_worker(spec, machine, rank, *one, nodes, python) for rank, one in enumerate(places)]
    placed = [*dealt, *(place for _, place in places)]
    hosts = {one.name: one for one in (*([first] if alone else spec.hosts), *(place.host for place in placed))}
    used = {process.host for process in (*scheduler, *servers, *workers)}
    return JobPlan(
        (*scheduler, *servers, *workers),
        spec.job_id,
        spec.graces,
        (*_notes(machine, spec, places), *((_DDP[spec.shares],) if spec.ddp else ())),
        tuple(host for name, host in hosts.items() if name in used) or (first,),
        spec.directory or machine.directory,
        spec.log_dir,
        spec.max_restarts,
        spec.quiet,
        spec.replace,
    )


def _settings(spec: JobSpec, places: Sequence[Placement]) -> dict[str, str]:
    """Return the job's settings; ``groups`` has ranks where it has names of the list of hosts.

    Workers know each other's addresses, but not these names.
    """
    settings = dict(spec.settings)
    if ";" in settings.get("groups", ""):
        hosts = [(place.host.name.rpartition("@")[2], place.local_rank) for place in places]
        settings["groups"] = name_ranks(settings["groups"], hosts)
    return settings


def _workers_alone(spec: JobSpec) -> list[tuple[WorkerGroup, Placement]]:
    groups = [group for group in spec.worker_groups for _ in range(group.count)]
    return list(zip(groups, place_alone(spec, "worker"), strict=True))


def _given(spec: JobSpec) -> set[str]:
    return {*spec.env, *spec.env_worker, *spec.env_server, *(name for group in spec.groups for name in group.env)}


def _role(spec: JobSpec, machine: Machine, role: str, rank: int, place: Placement) -> ProcessSpec:
    env: dict[str, Value] = environment.unbuffered(machine.environ)
    env |= spec.env
    env |= spec.env_server
    env |= environment.settings(spec)
    env |= environment.of_host(place.host.interface)
    env |= environment.identity(spec, role, rank, place.local_rank)
    return ProcessSpec(role, rank, (machine.python, "-P", "-m", "paceline", role), env, place.host.name)


def _worker(
    spec: JobSpec,
    machine: Machine,
    rank: int,
    group: WorkerGroup,
    place: Placement,
    nodes: Sequence[str],
    python: str,
) -> ProcessSpec:
    """Return a worker; ``python`` is what that word of its command means, empty: the host's PATH says so."""
    env: dict[str, Value] = environment.unbuffered(machine.environ)
    env |= environment.master(_master_host(spec, place), machine.environ) if spec.torchrun_env else {}
    env |= _threads(machine, place)
    env |= spec.env
    env |= spec.env_worker
    env |= group.env
    env |= environment.settings(spec)
    env |= environment.of_host(group.interface or place.host.interface)
    command = own_python(spec.command, python) if python and "PATH" not in env else spec.command
    env |= environment.of_group(spec, group, place.host.weight)
    env |= environment.torchrun(spec, rank, place, nodes) if spec.torchrun_env else {}
    env |= environment.mxnet(spec)
    env |= environment.identity(spec, "worker", rank, place.local_rank)
    return ProcessSpec("worker", rank, (*command, *group.args), env, place.host.name, group.name)


def _master_host(spec: JobSpec, place: Placement) -> str:
    """Return the host of ``torch.distributed``'s store if it is known beforehand, or nothing."""
    only = {host.name for host in spec.hosts} | {host.name for group in spec.groups for host in group.hosts}
    return LOCALHOST if only == {place.host.name} and place.host.name in (LOCALHOST, "localhost") else ""


def _threads(machine: Machine, place: Placement) -> dict[str, Value]:
    """Share the cores: N workers that each start a thread per core would slow each other down."""
    given = machine.environ.get("OMP_NUM_THREADS")
    if given:
        return {"OMP_NUM_THREADS": given}
    cores = machine.cores.get(place.host.name)
    return {} if cores is None else {"OMP_NUM_THREADS": str(max(1, cores // place.local_size))}


def _notes(machine: Machine, spec: JobSpec, places: list[tuple[WorkerGroup, Placement]]) -> tuple[str, ...]:
    if machine.environ.get("OMP_NUM_THREADS") or "OMP_NUM_THREADS" in _given(spec):
        return ()
    workers = {place.host.name: place for _, place in places}
    return tuple(
        f"OMP_NUM_THREADS={threads} for the workers on {host} ({machine.cores[host]} cores, {place.local_size} "
        "workers); set the variable yourself to choose another number of threads"
        for host, place in workers.items()
        for threads in _threads(machine, place).values()
    )
