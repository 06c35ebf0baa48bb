"""Make the job plan."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.launch import environment
from paceline.launch.plan import Plan, ProcessSpec, Value
from paceline.launch.spec import LOCALHOST, JobSpec


@dataclass(frozen=True)
class Machine:
    """What the planner needs to know about the machine."""

    python: str
    """The interpreter that runs scheduler and servers."""
    cores: Mapping[str, int] = field(default_factory=dict)
    """Usable cores by host, where known."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The launcher's environment."""

    @classmethod
    def here(cls) -> Machine:
        """Describe this machine and process."""
        return cls(sys.executable, {LOCALHOST: len(os.sched_getaffinity(0))}, dict(os.environ))


class Place(NamedTuple):
    """Where a process runs: host, index among the processes of its role there, and their number."""

    host: str
    local_rank: int
    local_size: int


def make_plan(spec: JobSpec, machine: Machine) -> Plan:
    """Turn a job spec into a job plan. Pure: the same arguments make the same plan.

    Of the launcher's environment the plan repeats only what changes a default (OMP_NUM_THREADS, MASTER_PORT,
    PYTHONUNBUFFERED). The backend passes the rest to each process.

    Raises:
        ValueError: ``spec.env`` sets a variable that gives a process its identity.
    """
    for name in sorted(environment.OWNED & set(spec.env)):
        raise ValueError(f"{name} is set by the launcher, for each process; it cannot be given")
    servers = [_role(spec, machine, "server", *place) for place in enumerate(places(spec.hosts, spec.servers))]
    scheduler = [_role(spec, machine, "scheduler", 0, Place(spec.hosts[0], 0, 1))] if servers else []
    workers = [_worker(spec, machine, *place) for place in enumerate(places(spec.hosts, spec.num_workers))]
    return Plan((*scheduler, *servers, *workers), spec.job_id, spec.graces, _notes(spec, machine))


def places(hosts: tuple[str, ...], count: int) -> list[Place]:
    """Deal ``count`` processes of one role to the hosts in turn."""
    dealt = [hosts[index % len(hosts)] for index in range(count)]
    sizes = Counter(dealt)
    so_far: Counter[str] = Counter()
    result = []
    for host in dealt:
        result.append(Place(host, so_far[host], sizes[host]))
        so_far[host] += 1
    return result


def _role(spec: JobSpec, machine: Machine, role: str, rank: int, place: Place) -> ProcessSpec:
    env: dict[str, Value] = environment.unbuffered(machine.environ)
    env |= spec.env
    env |= environment.settings(spec)
    env |= environment.identity(spec, role, rank, place.local_rank)
    return ProcessSpec(role, rank, (machine.python, "-m", "paceline", role), env, place.host)


def _worker(spec: JobSpec, machine: Machine, rank: int, place: Place) -> ProcessSpec:
    env: dict[str, Value] = environment.unbuffered(machine.environ)
    env |= environment.master(spec, machine.environ) if spec.torchrun_env else {}
    env |= _threads(machine, place)
    env |= spec.env
    env |= environment.settings(spec)
    env |= environment.torchrun(spec, rank, place.local_rank, place.local_size) if spec.torchrun_env else {}
    env |= environment.mxnet(spec)
    env |= environment.identity(spec, "worker", rank, place.local_rank)
    return ProcessSpec("worker", rank, spec.command, env, place.host)


def _threads(machine: Machine, place: Place) -> dict[str, Value]:
    """Share the cores: N workers that each start a thread per core would slow each other down."""
    given = machine.environ.get("OMP_NUM_THREADS")
    if given:
        return {"OMP_NUM_THREADS": given}
    cores = machine.cores.get(place.host)
    return {} if cores is None else {"OMP_NUM_THREADS": str(max(1, cores // place.local_size))}


def _notes(spec: JobSpec, machine: Machine) -> tuple[str, ...]:
    if machine.environ.get("OMP_NUM_THREADS") or "OMP_NUM_THREADS" in spec.env:
        return ()
    workers = {place.host: place for place in places(spec.hosts, spec.num_workers)}
    return tuple(
        f"OMP_NUM_THREADS={threads} for the workers on {host} ({machine.cores[host]} cores, {place.local_size} "
        "workers); set the variable yourself to choose another number of threads"
        for host, place in workers.items()
        for threads in _threads(machine, place).values()
    )
