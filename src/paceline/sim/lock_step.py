"""The time of a step in lock step, from flows over links that hosts share.

A model is cut into stages, runs of layers whose gradients travel together. A step of a host::

    forward, front first ──► backward, last first ──► push of each stage as its gradient appears
         ▲                                                     │ from all hosts
         └──── values of all stages ◄──── merge, update ◄──────┘

One stage of the whole model is a loop without overlap: it pushes when backward has ended.

Hosts of a kind do the same at the same time, so one stands for all of its kind: its flows count as many on the links of
servers. A stage of one bucket flows to the server that holds it. For a stage that is spread, the server with the
largest part of the model stands for all. So a job of 10,000 workers takes no more events than a job of one. A host
sends one message after the other to each server. A message takes as long as the slower of the flow on the sender's link
and the flow on the receiver's.

Servers on the hosts of workers share their links. There a bucket crosses no link of its holder's own worker, and one
link for all others: every host is a kind of its own. If a kind has several hosts, all stages count as spread.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from paceline.sim.resources import Processor, SharedLink, call_later, new_environment

#: Part of a step's computation that is forward; backward computes the gradients of both weights and inputs.
FORWARD = 1 / 3

#: Steps that are simulated. The last one counts: the first has no values to wait for.
STEPS = 4

#: Bytes of gradients that one all-reduce takes together, if they wait: the default of ``HOROVOD_FUSION_THRESHOLD``.
FUSION_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class Stage:
    """A run of layers."""

    size_bytes: float
    """Size of its gradients as they travel, and of its values."""
    work: float
    """Its part of the computation of a step."""
    server: int | None = None
    """The server that holds all of it; None: it is spread over all, as their parts of the model are."""


@dataclass(frozen=True)
class Hosts:
    """Equal hosts."""

    count: int
    workers: int
    """Workers of each host."""
    compute_s: float
    """Computation of a step."""
    bandwidth: float
    """Bytes per second of a host's link, each way."""


@dataclass(frozen=True)
class Servers:
    """Exchange with servers."""

    count: int
    largest_part: float
    """Part of the model that the fullest server holds, at least ``1 / count``."""
    bandwidth: float
    """Bytes per second of each, each way."""
    on_hosts: bool = False
    """Whether they run on the hosts of the workers, one on each of the first ones, and share their links."""
    merge_s: float = 0.0
    """Time to add one push of the whole model."""
    update_s: float = 0.0
    """Time to run the optimizer on the whole model."""


@dataclass(frozen=True)
class AllReduce:
    """Exchange by ring all-reduce, without servers: over all workers, or over hosts whose workers add up first."""


def step_seconds(
    hosts: Sequence[Hosts],
    stages: Sequence[Stage],
    exchange: Servers | AllReduce,
    *,
    merges: bool,
    latency_s: float = 0.0,
) -> float:
    """Return the time from one step to the next, with stages in forward order.

    Where ``merges`` is set, the workers of a host add up their gradients, so that one push, or one member of the ring,
    stands for the host. Within a host that takes no time.

    Raises:
        MissingExtraError: simpy is not installed.
    """
    environment = new_environment()
    job = _Job(environment, hosts, stages)
    if isinstance(exchange, Servers):
        job.push = _ThroughServers(environment, hosts, stages, exchange, merges, latency_s, job.take_values).push
    else:
        job.push = _ThroughRing(environment, hosts, stages, merges, latency_s, job.take_values).push
    job.start()
    environment.run()
    return job.last_step_s


#: Gets a kind of host and a stage: a gradient of it has appeared, or its values have come.
_Notice: TypeAlias = Callable[[int, int], None]


class _Job:
    """Computes on every kind of host."""

    push: _Notice

    def __init__(self, environment: Any, hosts: Sequence[Hosts], stages: Sequence[Stage]) -> None:
        self._environment, self._hosts, self._stages = environment, hosts, stages
        self._values = [0] * len(hosts)  # stages whose values have come, of all steps
        self._waits = [True] * len(hosts)  # for values, to begin a step
        self._ends: list[list[float]] = [[] for _ in hosts]

    @property
    def last_step_s(self) -> float:
        """Time between the ends of the last two steps of the kind of host that ends last."""
        return max(ends[-1] for ends in self._ends) - max(ends[-2] for ends in self._ends)

    def start(self) -> None:
        """Begin the first step, for which the values are there."""
        for kind in range(len(self._hosts)):
            self._begin(kind)

    def take_values(self, kind: int, stage: int) -> None:
        """Note that the values of a stage have come, and begin the next step if it waits for no others."""
        self._values[kind] += 1
        self._begin(kind)

    def _begin(self, kind: int) -> None:
        """Compute forward, if the step before has ended and all values have come."""
        if (
            not self._waits[kind]
            or len(self._ends[kind]) == STEPS
            or self._values[kind] < len(self._ends[kind]) * len(self._stages)
        ):
            return
        self._waits[kind] = False
        seconds = FORWARD * sum(one.work for one in self._stages) * self._hosts[kind].compute_s
        call_later(self._environment, seconds, partial(self._backward, kind, len(self._stages) - 1))

    def _backward(self, kind: int, stage: int) -> None:
        seconds = (1 - FORWARD) * self._stages[stage].work * self._hosts[kind].compute_s
        call_later(self._environment, seconds, partial(self._after_backward, kind, stage))

    def _after_backward(self, kind: int, stage: int) -> None:
        if stage == 0:
            self._ends[kind].append(self._environment.now)
            self._waits[kind] = True
        self.push(kind, stage)
        if stage:
            self._backward(kind, stage - 1)
        else:
            self._begin(kind)


class _Flow(NamedTuple):
    """Flows of one size on one link."""

    link: SharedLink
    size: float
    number: int


class _Lane:
    """Sends one message after the other, of those that wait the one with the lowest number."""

    def __init__(self, environment: Any, latency_s: float) -> None:
        self._environment, self._latency_s = environment, latency_s
        self._waiting: list[tuple[int, int, Sequence[_Flow], Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._busy = False
        self._flowing = 0

    def send(self, order: int, flows: Sequence[_Flow], then: Callable[[], None]) -> None:
        """Send a message that has ended when its flows have: on each link some of a size; without flows, at once."""
        if not flows:
            then()
            return
        heapq.heappush(self._waiting, (order, next(self._numbers), flows, then))
        self._begin()

    def _begin(self) -> None:
        if self._busy or not self._waiting:
            return
        _, _, flows, then = heapq.heappop(self._waiting)
        self._busy, self._flowing = True, len(flows)
        for link, size, number in flows:
            link.send(size, partial(self._end, then), number)

    def _end(self, then: Callable[[], None]) -> None:
        self._flowing -= 1
        if not self._flowing:
            self._busy = False
            call_later(self._environment, self._latency_s, then)
            self._begin()


class _ThroughServers:
    """Pushes of hosts, work on the servers, and answers."""

    def __init__(
        self,
        environment: Any,
        hosts: Sequence[Hosts],
        stages: Sequence[Stage],
        servers: Servers,
        merges: bool,
        latency_s: float,
        deliver: _Notice,
    ) -> None:
        self._hosts, self._stages, self._servers, self._deliver = hosts, stages, servers, deliver
        self._pushes = [1 if merges else one.workers for one in hosts]
        self._out, self._in = ([SharedLink(environment, one.bandwidth) for one in hosts] for _ in range(2))
        holders = {one.server for one in stages}
        self._push_lanes, self._answer_lanes = (
            {(kind, holder): _Lane(environment, latency_s) for kind in range(len(hosts)) for holder in holders}
            for _ in range(2)
        )
        self._processor = Processor(environment)
        self._came = [0] * len(stages)
        self._away = 1.0
        """Part of a spread stage that leaves a host."""
        self._single: dict[int, tuple[SharedLink, SharedLink]] = {}
        if servers.on_hosts:
            slowest = min(range(len(hosts)), key=lambda kind: hosts[kind].bandwidth)
            self._servers_out, self._servers_in = self._out[slowest], self._in[slowest]
            self._away -= 1 / sum(one.count for one in hosts)
            if len(hosts) >= servers.count:  # each is a kind of its own; servers are on the first ones
                self._single = dict(enumerate(zip(self._in, self._out, strict=True)))
        else:
            self._servers_out, self._servers_in = (SharedLink(environment, servers.bandwidth) for _ in range(2))
            self._single = {
                one: (SharedLink(environment, servers.bandwidth), SharedLink(environment, servers.bandwidth))
                for one in holders
                if one is not None
            }

    def push(self, kind: int, stage: int) -> None:
        """Send the gradient of a stage from all hosts of a kind; the values come back once all kinds have sent."""
        lane, flows = self._push_lanes[kind, self._stages[stage].server], self._flows(kind, stage, inwards=True)
        lane.send(0, flows, partial(self._arrive, stage))

    def _flows(self, kind: int, stage: int, *, inwards: bool) -> tuple[_Flow, ...]:
        """Return the flows of a host to or from all servers, and flows of the fullest server with all such hosts."""
        own = (self._out if inwards else self._in)[kind]
        pushes, size, holder = self._pushes[kind], self._stages[stage].size_bytes, self._stages[stage].server
        if holder is not None and holder in self._single:
            if self._servers.on_hosts and holder == kind:
                return ()
            server = self._single[holder][0 if inwards else 1]
            return _Flow(own, size, pushes), _Flow(server, size, pushes * self._hosts[kind].count)
        server, size = self._servers_in if inwards else self._servers_out, size * self._away
        part = _Flow(own, size / self._servers.count, pushes * self._servers.count)
        return part, _Flow(server, size * self._servers.largest_part, pushes * self._hosts[kind].count)

    def _arrive(self, stage: int) -> None:
        self._came[stage] += 1
        if self._came[stage] % len(self._hosts) == 0:
            self._processor.work(self._work_s(stage), partial(self._answer, stage))

    def _work_s(self, stage: int) -> float:
        """Return the time of the fullest server for its part of a stage."""
        pushes = sum(each * one.count for each, one in zip(self._pushes, self._hosts, strict=True))
        part = self._stages[stage].size_bytes / sum(one.size_bytes for one in self._stages)
        return (pushes * self._servers.merge_s + self._servers.update_s) * self._servers.largest_part * part

    def _answer(self, stage: int) -> None:
        for kind in range(len(self._hosts)):
            lane = self._answer_lanes[kind, self._stages[stage].server]
            flows = self._flows(kind, stage, inwards=False)
            lane.send(stage, flows, partial(self._deliver, kind, stage))


class _ThroughRing:
    """All-reduces, one after the other, each of all gradients that wait."""

    def __init__(
        self,
        environment: Any,
        hosts: Sequence[Hosts],
        stages: Sequence[Stage],
        merges: bool,
        latency_s: float,
        deliver: _Notice,
    ) -> None:
        self._environment, self._kinds, self._stages, self._deliver = environment, len(hosts), stages, deliver
        members = sum(one.count * (1 if merges else one.workers) for one in hosts)
        crosses = sum(one.count for one in hosts) > 1
        self._factor = 2 * (members - 1) / members if crosses else 0.0
        self._latency_s = 2 * (members - 1) * latency_s if crosses else 0.0
        self._link = SharedLink(environment, min(one.bandwidth for one in hosts))
        self._came, self._waiting, self._busy = [0] * len(stages), list[int](), False

    def push(self, kind: int, stage: int) -> None:
        """Reduce the gradient of a stage once it is there on hosts of all kinds."""
        self._came[stage] += 1
        if self._came[stage] % self._kinds == 0:
            self._waiting.append(stage)
            self._begin()

    def _begin(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy, size, taken = True, 0.0, list[int]()
        while self._waiting and (not taken or size + self._size(self._waiting[0]) <= FUSION_BYTES):
            size += self._size(self._waiting[0])
            taken.append(self._waiting.pop(0))
        done = partial(call_later, self._environment, self._latency_s, partial(self._end, taken))
        self._link.send(self._factor * size, done)

    def _size(self, stage: int) -> float:
        return self._stages[stage].size_bytes

    def _end(self, taken: Sequence[int]) -> None:
        self._busy = False
        for stage in sorted(taken):
            for kind in range(self._kinds):
                self._deliver(kind, stage)
        self._begin()
