"""Place the processes of a job on hosts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.launch.host_list import Host
from paceline.launch.job_spec import JobSpec
from paceline.launch.worker_groups import WorkerGroup


class Placement(NamedTuple):
    """Where a process runs: host, index among the processes of its role there, and their number."""

    host: Host
    local_rank: int
    local_size: int


def place_servers(spec: JobSpec) -> list[Placement]:
    """Deal the servers to the job's hosts in turn; slots do not count."""
    return _numbered([spec.hosts[index % len(spec.hosts)] for index in range(spec.servers)])


def place_workers(spec: JobSpec) -> list[tuple[WorkerGroup, Placement]]:
    """Deal the workers of each group to its hosts in turn, as long as a host has slots.

    The ranks of a group's workers on one host follow each other, as torchrun's and Horovod's do: scripts work out
    their node as ``rank // local_size``.

    Raises:
        ValueError: a group has no host, or the hosts have too few slots.
    """
    used: Counter[str] = Counter()
    groups, dealt = [], []
    for group in spec.worker_groups:
        hosts = group.hosts or tuple(host for host in spec.hosts if host.group in ("", group.name) or not spec.groups)
        if not hosts:
            raise ValueError(f"group {group.name} has no host: none in the list is marked group={group.name} or free")
        names = [host.name for host in hosts]
        dealt += sorted(_deal(group, hosts, used), key=lambda host: names.index(host.name))
        groups += [group] * group.count
    return list(zip(groups, _numbered(dealt), strict=True))


def place_alone(spec: JobSpec, role: str) -> list[Placement]:
    """Give every process of a role a host of its own, named ``ROLE-RANK``: where an engine chooses the hosts."""
    count = spec.num_workers if role == "worker" else spec.servers
    return [Placement(Host(f"{role}-{rank}"), 0, 1) for rank in range(count)]


def _deal(group: WorkerGroup, hosts: Sequence[Host], used: Counter[str]) -> list[Host]:
    dealt: list[Host] = []
    own: Counter[str] = Counter()
    while len(dealt) < group.count:
        before = len(dealt)
        for host in hosts:
            is_free = host.slots is None or used[host.name] < host.slots
            if len(dealt) < group.count and is_free and (group.slots is None or own[host.name] < group.slots):
                dealt.append(host)
                used[host.name] += 1
                own[host.name] += 1
        if len(dealt) == before:
            name = "" if group.name == "all" else f" of group {group.name}"
            raise ValueError(
                f"{group.count} workers{name} do not fit: the hosts {', '.join(map(str, hosts))} have {len(dealt)} "
                "slots for them; raise slots=, add hosts, or ask for fewer workers"
            )
    return dealt


def _numbered(dealt: Iterable[Host]) -> list[Placement]:
    hosts = list(dealt)
    sizes = Counter(host.name for host in hosts)
    so_far: Counter[str] = Counter()
    result = []
    for host in hosts:
        result.append(Placement(host, so_far[host.name], sizes[host.name]))
        so_far[host.name] += 1
    return result
