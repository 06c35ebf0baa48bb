"""The hosts that Grid Engine has given a job. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.launch.hosts import Host
from paceline.launch.spec import JobSpec


@dataclass(frozen=True)
class Slots:
    """A line of the file that ``PE_HOSTFILE`` names."""

    host: str
    count: int


def read_hostfile(text: str) -> tuple[Slots, ...]:
    """Read lines of the form ``HOST SLOTS QUEUE@HOST PROCESSORS``.

    Raises:
        ValueError: a line has another form, or there is none.
    """
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or not words[1].isdecimal():
            raise ValueError(f"PE_HOSTFILE: {line!r} is not HOST SLOTS QUEUE@HOST PROCESSORS")
        found.append(Slots(words[0], int(words[1])))
    if not found:
        raise ValueError("PE_HOSTFILE names no host")
    return tuple(found)


def on_allocation(spec: JobSpec, slots: tuple[Slots, ...]) -> JobSpec:
    """Return the spec with the hosts of an allocation: a slot for each server, the others for workers."""
    free = {one.host: 0 for one in slots}
    for one in slots:
        free[one.host] += one.count
    names = list(free)
    taken = dict.fromkeys(names, 0)
    for index in range(spec.servers):
        taken[names[index % len(names)]] += 1
    left = {name: max(0, free[name] - taken[name]) for name in names}
    if sum(left.values()) < spec.num_workers:  # more servers than hosts: several share a slot
        left = free
    return replace(spec, hosts=tuple(Host(name, slots=left[name]) for name in names))
