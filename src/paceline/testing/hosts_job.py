"""A whole job on several hosts of :mod:`paceline.testing.hosts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline import config
from paceline.testing.faults import Faults
from paceline.testing.hosts import Hosts, NamespaceHost
from paceline.testing.job import LocalJob


class HostsJob(LocalJob):
    """A :class:`~paceline.testing.LocalJob` whose processes are spread over hosts; the scheduler is on the first. ::

        with Hosts(2) as hosts, HostsJob(hosts, workers=[1, 1], servers=[1, 1]) as job:
            losses = job.run(train, "adam", 50)

    Args:
        hosts: where the processes run.
        workers: how many on each host; ranks count host by host.
        servers: how many on each host.
        environment: further variables for all processes.
        faults: of the network and the processes.
        **settings: fields of :class:`paceline.config.Settings` for all processes; ``check_rules`` is on by default.
    """

    def __init__(
        self,
        hosts: Hosts,
        workers: Sequence[int] = (1, 1),
        servers: Sequence[int] = (1, 0),
        *,
        environment: Mapping[str, str] | None = None,
        faults: Faults | None = None,
        **settings: Any,
    ) -> None:
        for role, numbers in (("workers", workers), ("servers", servers)):
            if len(numbers) != len(hosts):
                raise ValueError(f"{role}={list(numbers)} has {len(numbers)} numbers for {len(hosts)} hosts")
        super().__init__(sum(workers), sum(servers), environment=environment, faults=faults, **settings)
        self._scheduler_host = hosts[0].address
        self._places = {("scheduler", 0): (hosts[0], 0)}
        self._places |= _places("worker", workers, hosts) | _places("server", servers, hosts)

    def host_of(self, role: str, rank: int) -> NamespaceHost:
        """Return the host on which a process runs."""
        return self._places[role, rank][0]

    def _placed(self, role: str, rank: int, argv: Sequence[str]) -> Sequence[str]:
        return self.host_of(role, rank).command(argv)

    def _fork_server(self) -> None:
        """Return None: a process enters its host's namespace before it becomes Python."""

    def _environment(self, role: str, rank: int, scheduler: str) -> dict[str, str]:
        host, local_rank = self._places[role, rank]
        own = {config.variable("host"): host.address, config.variable("local_rank"): str(local_rank)}
        return super()._environment(role, rank, scheduler) | own


def _places(role: str, numbers: Sequence[int], hosts: Hosts) -> dict[tuple[str, int], tuple[NamespaceHost, int]]:
    """Return host and local rank of every process of a role."""
    places = [(host, local_rank) for host, number in zip(hosts, numbers, strict=True) for local_rank in range(number)]
    return {(role, rank): place for rank, place in enumerate(places)}
