"""Which hosts a job is worth having, where its servers run, and how fast it then is: ``paceline up``.

All of it follows from a short job on all hosts, one server on each (:class:`~paceline.hetero.files.Report`), and from
the rates of the links between them. Rounds of other hosts and servers are as in :mod:`paceline.sim.lock_step`, where
every host pushes all at the end of its step and waits for all values. Where the measured exchange took longer, the
difference is added to every other one; where it took less, as pushes overlap with the computation, the others take less
by the same factor. So the plan of the measured layout is the measurement itself. A simulated one that looks better is
measured in turn (:meth:`HostPlanner.learn`): while a host waits for a slow one, its CPU quota fills up and answers
come, and without the slow one that time is missing. No round of the first job shows it.

The hosts to keep are the fastest ones, as many as make the job fastest. Steps of a host count with its way to a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean

from paceline.hetero import Groups, Measured, choose, fastest_split, group_by_speed, measured_of
from paceline.hetero.choose import candidates, preferred
from paceline.hetero.files import Report
from paceline.hetero.forecast import Forecast, in_groups
from paceline.hetero.local_plan import CODECS, COMPUTING, ELEMENT_BYTES, ExchangeCost, LocalPlan, plan_local
from paceline.sim.lock_step import Hosts, Servers, Stage, step_seconds

#: Hosts are left out if the job is at least this part as fast without them; other servers must be this much faster.
ENOUGH, LEAD = 0.99, 1.05

#: Workers whose batches differ by more have shares of their own: the sum of all batches then stays when a host leaves.
_UNEVEN = 1.1

#: Stores whose workers do not wait for each other; for some rounds; and those that need groups that were measured.
_FREE, _BOUNDED, MEASURES_FIRST = ("dist_async", "dist_ksync"), ("dist_ssync",), ("dist_auto", "dist_gsync")

Links = Mapping[tuple[str, str], tuple[float, float]]
"""By pair of hosts: bytes per second of the slower direction, and seconds of a round trip. Pairs may be missing."""


@dataclass(frozen=True)
class PlannedJob:
    """Hosts and servers of a job, and its rate."""

    hosts: tuple[str, ...]
    """In the order in which servers, and then workers, are dealt to them."""
    servers: int
    samples_per_s: float
    round_s: float = 0.0
    """Time of a round of all workers; 0 where workers do not wait for each other."""
    compute_s: float = 0.0
    """The part of it in which the slowest worker computes."""
    slowest: str = ""
    """The host of the slowest worker."""
    words: str = ""
    """The choice of ``dist_auto``, and its reason."""


@dataclass(frozen=True)
class HostsPlan:
    """The job to run."""

    job: PlannedJob
    adds: Mapping[str, float]
    """By host, samples per second that the job would lose without it; of hosts that are left out, gain with it."""
    left_out: tuple[str, ...]
    better: Forecast | None
    """A way to synchronise that is forecast to be faster by a tenth, with these hosts."""


class HostPlanner:
    """Plans a job from measurements.

    Args:
        hosts: the host of each worker, in order of rank.
        servers: servers of the job, on its first hosts; 0: on all.

    Attributes:
        measured: times of all workers.
        batches: by rank, samples of a step.
        is_uneven: workers have different batches, whose sum stays.
        measured_round_s: mean time of the measured rounds.
    """

    def __init__(self, report: Report, hosts: Sequence[str], links: Links, servers: int = 0) -> None:
        self.report, self._links = report, links
        self._ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            self._ranks.setdefault(host, []).append(rank)
        largest = [max(step.samples for step in steps) for steps in report.steps]
        usual = _rounds(report, largest)
        self.batches = [fmean(steps[one].samples for one in usual) for steps in report.steps]
        self.measured = measured_of(report.steps, round(max(largest)), report.update_s)
        self.is_uneven = report.store_type not in MEASURES_FIRST and max(self.batches) > _UNEVEN * min(self.batches)
        self._cycles = [
            _usual_mean([steps[one].seconds + steps[one].waited_s for one in usual]) for steps in report.steps
        ]
        self.measured_round_s: float = fmean(self._cycles)
        self._servers = servers or len(self._ranks)
        self._learned: dict[tuple[frozenset[str], int], PlannedJob] = {}
        self._came_true: dict[frozenset[str], float] = {frozenset(self._ranks): 1.0}
        """By hosts of a job that was measured, its rate over that which was forecast."""

    @property
    def measured_job(self) -> PlannedJob:
        """The job that was measured."""
        return self.job(self.names, self._servers)

    def learn(self, other: HostPlanner) -> None:
        """Take in the measured job of some of the hosts."""
        job = other.measured_job
        hosts = frozenset(job.hosts)
        self._came_true[hosts] = job.samples_per_s / self._forecast(job.hosts, job.servers).samples_per_s
        self._learned[hosts, job.servers] = job

    def knows(self, job: PlannedJob) -> bool:
        """Return whether a job was measured: its rate is no forecast."""
        is_first = (set(job.hosts), job.servers) == (set(self.names), self._servers)
        return is_first or (frozenset(job.hosts), job.servers) in self._learned

    @property
    def names(self) -> list[str]:
        """All hosts."""
        return list(self._ranks)

    def ranks_of(self, host: str) -> list[int]:
        """Return the ranks of a host's workers."""
        return self._ranks[host]

    def link(self, host: str) -> float:
        """Return bytes per second of a host's fastest link."""
        return max((rate for pair, (rate, _) in self._links.items() if host in pair), default=float("inf"))

    def step_s(self, host: str) -> float:
        """Return the time in which the slowest worker of a host computes a step."""
        return max(self.measured.workers[rank].seconds(self.batches[rank]) for rank in self._ranks[host])

    def alone(self, host: str) -> float:
        """Return the samples per second that a host's workers compute without any exchange."""
        return sum(
            self.batches[rank] / self.measured.workers[rank].seconds(self.batches[rank]) for rank in self._ranks[host]
        )

    def plan(self, *, keep_all: bool = False, only_known: bool = False) -> HostsPlan:
        """Return the job to run.

        Args:
            keep_all: leave out no host.
            only_known: plan no job that was not measured.

        Raises:
            MissingExtraError: simpy is not installed, and there are several hosts.
        """
        if only_known:
            known = [self.measured_job, *self._learned.values()]
            best = max(
                (one for one in known if not keep_all or len(one.hosts) == len(self.names)),
                key=lambda one: one.samples_per_s,
            )
        else:
            best = self.best(self.names) if keep_all else self._fastest()
        adds = {name: self._adds(best, name) for name in self.names}
        left_out = tuple(name for name in self.names if name not in best.hosts)
        return HostsPlan(best, adds, left_out, self._better(best))

    def _fastest(self) -> PlannedJob:
        """Return the fastest job of the fastest hosts, without those that it does as well without."""
        order = sorted(self.names, key=self._own_round_s)
        jobs = [self.best([name for name in self.names if name in order[:count]]) for count in range(len(order), 0, -1)]
        best = jobs[0]
        for job in jobs[1:]:
            if job.samples_per_s * ENOUGH >= best.samples_per_s:
                best = job
        return self._without_idle(best)

    def best(self, hosts: Sequence[str]) -> PlannedJob:
        """Return the fastest job of some hosts: servers on all of them, or on those with the fastest links."""
        by_link = sorted(hosts, key=self.link, reverse=True)
        counts = {2**power for power in range(len(hosts).bit_length()) if 2**power < len(hosts)} | {len(hosts)}
        best = self.job(hosts, len(hosts))
        if self.report.store_type in (*_FREE, *_BOUNDED):
            return best
        for count in sorted(counts, reverse=True):
            other = self.job(by_link, count)
            if other.samples_per_s > LEAD * best.samples_per_s:
                best = other
        return best

    def job(self, hosts: Sequence[str], servers: int) -> PlannedJob:
        """Return a job of some hosts, with a server on each of the first ones: as it was measured, or a forecast.

        A forecast is corrected by what became of the forecast for the hosts that differ least.
        """
        some = frozenset(hosts)
        if learned := self._learned.get((some, servers)):
            return learned
        found = self._forecast(hosts, servers)
        _, part = min((len(some ^ one), -ratio) for one, ratio in self._came_true.items())
        return replace(found, samples_per_s=-part * found.samples_per_s, round_s=found.round_s / -part)

    def _forecast(self, hosts: Sequence[str], servers: int) -> PlannedJob:
        ranks = [rank for host in hosts for rank in self._ranks[host]]
        kind, names = self.report.store_type, tuple(hosts)
        if kind in _FREE:
            return PlannedJob(names, servers, sum(self.batches[rank] / self._cycles[rank] for rank in ranks))
        batches = self.parts(ranks)
        times = {rank: self.measured.workers[rank].seconds(batches[rank]) for rank in ranks}
        slowest = max(times, key=lambda rank: times[rank])
        compute_s = self.measured.noise.slowest(list(times.values()))
        if kind in _BOUNDED:
            round_s = max(times.values()) + self.measured.exchange_s
        else:
            compute_s = self._stretch * max(times.values())
            round_s = compute_s + self._exchange_s(names, servers, times)
        rate, words = sum(batches.values()) / round_s, ""
        if kind in MEASURES_FIRST:
            forecast, words = self._chosen(ranks, round_s - compute_s)
            rate = forecast
        host = next(name for name in hosts if slowest in self._ranks[name])
        return PlannedJob(names, servers, rate, round_s, min(compute_s, round_s), host, words)

    def parts(self, ranks: Sequence[int]) -> dict[int, float]:
        """Return the batch of each worker in a job of some: its own, or its share of a global batch that stays."""
        if not self.is_uneven:
            return {rank: self.batches[rank] for rank in ranks}
        total = round(sum(self.batches))
        return dict(zip(ranks, map(float, fastest_split(total, [self.measured.workers[one] for one in ranks])),
                        strict=True))  # fmt: skip

    def _simulated_s(self, hosts: Sequence[str], servers: int, times: Mapping[int, float]) -> float:
        own = [max(times[rank] for rank in self._ranks[host]) for host in hosts]
        if len(hosts) == 1:
            return max(own)
        sizes = [
            Hosts(1, len(self._ranks[host]), seconds, self._bandwidth(host, hosts[:servers]))
            for host, seconds in zip(hosts, own, strict=True)
        ]
        # All computation is the last stage's: its backward is the first, and its forward waits for all values.
        part = 4.0 * self.report.elements / servers
        stages = [Stage(part, float(one == servers - 1), one) for one in range(servers)]
        trips = [trip for pair, (_, trip) in self._links.items() if set(pair) <= set(hosts)]
        latency_s = fmean(trips) / 2 if trips else 0.0
        exchange = Servers(servers, 1 / servers, float("inf"), on_hosts=True)
        return step_seconds(sizes, stages, exchange, merges=True, latency_s=latency_s)

    def _exchange_s(self, hosts: Sequence[str], servers: int, times: Mapping[int, float]) -> float:
        """Return the simulated exchange as it would be measured: with its overhead, or less by what overlaps."""
        found = self._simulated_s(hosts, servers, times) - max(times.values())
        measured, simulated = self.measured.exchange_s, self._simulated_exchange_s
        return found * measured / simulated if measured < simulated else found + measured - simulated

    @cached_property
    def _simulated_exchange_s(self) -> float:
        """The simulated exchange of the measured job."""
        times = {rank: speed.seconds(self.batches[rank]) for rank, speed in enumerate(self.measured.workers)}
        simulated_s = self._simulated_s(self.names, self._servers, times)
        return simulated_s - max(times.values())

    @cached_property
    def _stretch(self) -> float:
        """How much longer the slowest worker of a round computes than the slowest one usually does."""
        slowest_s = max(self.step_s(name) for name in self.names)
        return max(0.0, self.measured_round_s - self.measured.exchange_s) / slowest_s

    def _bandwidth(self, host: str, servers: Sequence[str]) -> float:
        """Return bytes per second of a host's way to the servers; of its own link where a server is on it."""
        ways = [(one, other) for server in servers for one, other in ((host, server), (server, host))]
        rates = [self._links[way][0] for way in ways if way in self._links and host not in servers]
        return min([self.link(host), *rates])

    def _own_round_s(self, host: str) -> float:
        return self.step_s(host) + 2 * 4.0 * self.report.elements / self.link(host)

    def _without_idle(self, job: PlannedJob) -> PlannedJob:
        """Leave out hosts without which the job is as fast, one after the other."""
        for name in sorted(job.hosts, key=self._own_round_s, reverse=True):
            others = [one for one in self.names if one in job.hosts and one != name]
            if others and (without := self.best(others)).samples_per_s >= ENOUGH * job.samples_per_s:
                job = without
        return job

    def _adds(self, job: PlannedJob, host: str) -> float:
        others = [name for name in self.names if (name in job.hosts) != (name == host)]
        if not others:
            return job.samples_per_s
        other = self.best(others).samples_per_s
        return job.samples_per_s - other if host in job.hosts else other - job.samples_per_s

    def _of(self, ranks: Sequence[int], exchange_s: float) -> tuple[Measured, Groups]:
        """Return the measurements of some workers as the choice of ``dist_auto`` takes them."""
        all_of, speeds = self.measured, tuple(self.measured.workers[rank] for rank in ranks)
        batch = round(fmean(self.batches[rank] for rank in ranks))
        update_s = min(all_of.update_s, max(exchange_s, 0.0))
        found = Measured(speeds, max(1, batch), all_of.noise, max(exchange_s, 0.0), update_s, hands_out=True)
        return found, _groups(found.seconds)

    def _chosen(self, ranks: Sequence[int], exchange_s: float) -> tuple[float, str]:
        """Return the rate with ``dist_auto`` or ``dist_gsync``, and the choice."""
        measured, groups = self._of(ranks, exchange_s)
        if self.report.store_type == "dist_gsync":
            return in_groups(measured, groups).samples_per_s, f"{len(groups)} groups by speed"
        best = preferred(candidates(measured, groups))
        return best.samples_per_s, choose(measured, groups).words

    def local(self, job: PlannedJob) -> LocalPlan | None:
        """Return local steps with which workers compute nearly all of the time; None: they do so without.

        Of workers that do not wait for each other nothing is known about the exchange.
        """
        exchange_s = job.round_s - job.compute_s
        if not job.round_s or exchange_s <= (1 - COMPUTING) * job.round_s:
            return None
        exchanges = {codec: ExchangeCost(exchange_s * ELEMENT_BYTES.get(codec, 4.0) / 4.0) for codec in CODECS}
        return plan_local(min(self.step_s(host) for host in job.hosts), exchanges)

    def _better(self, job: PlannedJob) -> Forecast | None:
        ranks = [rank for host in job.hosts for rank in self._ranks[host]]
        if self.report.store_type != "dist_sync" or self.is_uneven or len(ranks) == 1:
            return None
        ways = candidates(*self._of(ranks, job.round_s - job.compute_s))
        best = preferred(ways)
        return best if best is not ways[0] else None


def _rounds(report: Report, largest: Sequence[float]) -> list[int]:
    """Return the rounds that a job has: with whole batches, and once shares that are measured have settled."""
    count = len(report.steps[0])
    whole = [
        one
        for one in range(count)
        if all(steps[one].samples > most / 2 for steps, most in zip(report.steps, largest, strict=True))
    ]
    if report.store_type in MEASURES_FIRST:
        return whole or list(range(count))
    changes = [
        one + 1
        for steps in report.steps
        for one, (before, after) in enumerate(pairwise(step.samples for step in steps))
        if before != after
    ]
    return list(range(count // 2 if changes else 0, count))


def _usual_mean(seconds: Sequence[float]) -> float:
    """Return the mean without the shortest and the longest tenth: a neighbour's job is not in every round."""
    cut = len(seconds) // 10
    return fmean(sorted(seconds)[cut : len(seconds) - cut])


def _groups(seconds: Sequence[float]) -> Groups:
    """Return workers of like speed; each its own group where no group is known."""
    try:
        return group_by_speed(seconds)
    except ImportError:
        return tuple((rank,) for rank in sorted(range(len(seconds)), key=lambda rank: seconds[rank]))
