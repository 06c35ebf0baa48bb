"""The processes of a job on several hosts, behind the agents that started them."""

from __future__ import annotations

import signal
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import LaunchError
from paceline.host.interfaces import tcp
from paceline.launch.host_list import LOCALHOST, Host
from paceline.launch.plan import SCHEDULER, JobPlan, Late, ProcessName, ProcessSpec, address_parts
from paceline.launch.remote.agent_link import PING_S, AgentLink, data, members
from paceline.launch.remote.pinger import Pinger
from paceline.launch.remote.request import RemoteRequest
from paceline.launch.supervise.crew import Processes, serve
from paceline.launch.supervise.events import (
    Event,
    Exited,
    NotStarted,
    Runs,
    Started,
    Stopped,
    Unheard,
    event_of,
    words_of,
)
from paceline.launch.supervise.supervisor import Surroundings
from paceline.observe.table import plural

#: How long agents may take to end their processes, after the job.
_FINISH_S = 5.0

#: Pause before a host is reached again: as long as the tries have taken, within these limits.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0

#: Silence after which signals may not arrive. A host answers every ping.
_UNHEARD_S = 3 * PING_S

#: Exit code of processes whose host was lost.
LOST_CODE = 255


class HostsAbsentError(LaunchError):
    """Hosts do not answer.

    Attributes:
        hosts: their names.
    """

    def __init__(self, text: str, hosts: Iterable[str]) -> None:
        super().__init__(text)
        self.hosts = tuple(hosts)


class RemoteCrew(Processes):
    """Opens a link to each host of a plan, and carries out the supervisor's requests through it.

    Each host's own interpreter takes the place of the launcher's in commands. With ``waits`` any host that cannot be
    reached is tried until the time for the start has passed: the job ran there before.
    """

    def __init__(self, around: Surroundings, request: RemoteRequest, waits: bool = False) -> None:
        self._around, self._request, self._waits = around, request, waits
        plan = self._plan = request.plan
        self._hosts = {host.name: host for host in plan.hosts}
        self._host_of = {process.member: process.host for process in plan}
        self._workers_on = Counter(process.host for process in plan if process.role == "worker")
        self._interfaces = _interfaces(plan)
        self._retry_at: dict[str, float] = {}
        """When hosts are reached again that did not answer."""
        self._asked_at: float | None = None
        self._failed: LaunchError | None = None
        self._running: dict[ProcessName, None] = {}
        """Processes that agents were told to start, and whose ends are not known."""
        self._left: dict[str, list[ProcessName]] = {}
        self._stopped: dict[str, frozenset[ProcessName]] = {}
        self._lost: set[str] = set()
        self._began = time.monotonic()
        self._check_at = 0.0
        self._pinger: Pinger | None = None
        self._signalled = False
        self._links = {host.name: self._link(host) for host in plan.hosts}

    def _link(self, host: Host) -> AgentLink:
        around = self._around
        command = self._request.command(host)
        return AgentLink(host.name, command, around.selector, around.register, self._heard, around.console.say)

    def opening(self) -> bool:
        """Tell whether hosts have not reported yet."""
        if self._failed is not None:
            raise self._failed
        now = time.monotonic()
        ended = next(
            (one for one in self._links.values() if one.about and not one.address and one.code is not None), None
        )
        if ended is not None:
            raise HostsAbsentError(self._request.explain(self._hosts[ended.host], ended), [ended.host])
        silent = [link for link in self._links.values() if not link.about]
        for link in silent:
            link.type_command(now)
            if link.code is not None:
                link.drain()
                if not link.about:
                    self._reach_again(link, now)
        if not silent and self._asked_at is None:
            self._ask(now)
        absent = [link for link in silent or self._links.values() if not link.address]
        start_s = self._plan.graces.start_s
        late = [link.host for link in absent if now > (self._asked_at or link.heard_at) + start_s]
        if late:
            ready = len(self._links) - len(absent)
            others = f"; {plural(ready, 'other host is', 'other hosts are')} ready" if ready else ""
            said = f"no answer from {', '.join(late)} within {start_s:g} s{others}; try: ssh {late[0]} true"
            raise HostsAbsentError(said, late)
        return bool(absent)

    def _reach_again(self, link: AgentLink, now: float) -> None:
        """Reach a host again, after a pause, whose remote shell got no answer: it may be busy."""
        start_s, tried_s = self._plan.graces.start_s, now - self._began
        due = self._retry_at.get(link.host)
        if due is None:
            why = self._request.explain(self._hosts[link.host], link)
            if tried_s > start_s or not (self._waits or link.was_unanswered):
                raise HostsAbsentError(why, [one.host for one in self._links.values() if not one.about])
            self._around.console.say(f"{why}; trying again until {start_s:g} s have passed")
            self._retry_at[link.host] = now + min(max(tried_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        elif now >= due:
            del self._retry_at[link.host]
            link.close()
            self._links[link.host] = self._link(self._hosts[link.host])

    def late(self, scheduler: str | None) -> Mapping[Late, str]:
        """Return the parts of the scheduler's address, and an address for worker 0's store."""
        first = self._links[self._host_of[ProcessName("worker", 0)]]
        known = {Late.MASTER_ADDR: first.address, Late.MASTER_PORT: str(first.port)}
        return known | address_parts(scheduler)

    def deadline(self) -> float | None:
        """Return when to look again: for hosts that fall silent, or while hosts have not reported."""
        first = min(link.heard_at for link in self._links.values()) + self._plan.graces.start_s
        typing = [link.type_at for link in self._links.values() if not link.about]
        return min([self._check_at or first, *self._retry_at.values(), *typing])

    def start(self, process: ProcessSpec, known: Mapping[Late, str]) -> None:
        """Have a process started."""
        link = self._links[process.host]
        if link.host in self._lost:
            why = self._request.explain(self._hosts[link.host], link)
            self._around.take(NotStarted(process.member, why, LOST_CODE))
            return
        own = {Late.BIND: tcp(link.address or LOCALHOST, 0), Late.READY_FD: "", Late.ENDED_FD: ""}
        env = process.environment({**known, **own})
        if process.role == "worker" and "OMP_NUM_THREADS" not in {**self._request.environ, **env}:
            env["OMP_NUM_THREADS"] = str(max(1, int(link.about["cores"]) // self._workers_on[process.host]))
        argv = [str(link.about["python"]) if word == self._request.python else word for word in process.argv[:1]]
        self._running[process.member] = None
        link.send("start", process.role, process.rank, [*argv, *process.argv[1:]], env)

    def check(self) -> None:
        """Notice links that have ended, and hosts that are silent."""
        now = time.monotonic()
        if not any(link.about for link in self._links.values()):
            return
        self._check_at = now + PING_S
        for link in self._links.values():
            if link.host not in self._lost and link.about and (link.code is not None or link.is_silent(now)):
                link.drain()
                self._lost.add(link.host)
                self._left.pop(link.host, None)
            if link.host in self._lost:
                self._lose(link)
        late = {link.host for link in self._links.values() if link.about and now > link.heard_at + _UNHEARD_S}
        self._around.take(Unheard(frozenset(member for member in self._running if self._host_of[member] in late)))

    def look(self, members: Collection[ProcessName]) -> None:
        """Ask how much CPU time processes have used."""
        for link, there in self._by_link(members):
            link.send("look", there)

    def tell_scheduler(self, words: Sequence[Any]) -> None:
        """Have the scheduler told."""
        if SCHEDULER in self._host_of:
            self._links[self._host_of[SCHEDULER]].send(*words)

    def send(self, signum: int, members: Collection[ProcessName]) -> None:
        """Have processes signalled."""
        for link, there in self._by_link(members):
            link.send("signal", signum, there)

    def pass_on(self, signum: int) -> bool:
        """Have every host give its processes a signal."""
        for link in self._links.values():
            if link.about:
                link.send("pass_on", signum)
        return True

    def _by_link(self, members: Collection[ProcessName]) -> list[tuple[AgentLink, list[ProcessName]]]:
        by_host = defaultdict(list)
        for member in members:
            by_host[self._host_of[member]].append(member)
        return [(self._links[host], there) for host, there in by_host.items()]

    def living(self) -> list[ProcessName]:
        """Return the processes that run or have left something running, as far as their agents have said."""
        return [*self._running, *(member for left in self._left.values() for member in left)]

    def finish(self) -> None:
        """Have the agents end their processes, and wait for their own end."""
        self._end_pings()
        for link in self._links.values():
            link.hang_up()
            if not link.about:
                link.kill()
        serve(self._around.selector, _FINISH_S, lambda: all(link.code is not None for link in self._links.values()))

    def close(self) -> None:
        """Let go of the links."""
        self._end_pings()
        for link in self._links.values():
            link.close()

    def _greet(self, link: AgentLink, about: dict[str, Any]) -> None:
        link.about = about
        self._pinger = self._pinger or Pinger()
        link.keep_alive(self._pinger.add)

    def _end_pings(self) -> None:
        if self._pinger is not None:
            self._pinger.close()

    def _ask(self, now: float) -> None:
        """Ask every host for its address towards the others, once all can be named."""
        self._asked_at, ports = now, self._plan.setting("ports", self._request.environ)
        for link in self._links.values():
            link.send("environ", dict(self._request.environ))
            link.ask_address(self._interfaces[link.host], self._links.values(), ports)

    def _heard(self, link: AgentLink, line: list[Any]) -> None:
        stranger = next((one for one in _named(line) if one not in self._host_of), None)
        if stranger is not None:
            link.refuse(f"it says something of {stranger}, which is no process of this job")
            return
        match line:
            case ["hello", dict() as about]:
                self._greet(link, about)
            case ["address", str() as address, int() as port]:
                link.address, link.port = address, port
            case ["refused", str() as reason]:
                self._failed = LaunchError(f"host {link.host}: {reason}")
            case ["out", str() as role, int() as rank, int() as stream, str() as text]:
                self._around.console.feed(ProcessName(role, rank), stream, data(text))
            case ["closed", str() as role, int() as rank, int() as stream]:
                self._around.console.close(ProcessName(role, rank), stream)
            case ["signalled", int() as signum]:
                if not self._signalled:  # the engine ends the job, and says so on every host
                    self._signalled = True
                    signal.raise_signal(signum)
            case ["living", list() as left]:
                self._left[link.host] = members(left)
            case _:
                event = event_of(line)
                if event is not None:
                    self._happened(link, event)

    def _happened(self, link: AgentLink, event: Event) -> None:
        match event:
            case Started(member, place):
                event = Started(member, f"{place} on {link.host}")
            case Stopped(stopped):
                self._stopped[link.host] = stopped
                event = Stopped(frozenset[ProcessName]().union(*self._stopped.values()))
            case NotStarted(member):
                self._running.pop(member, None)
            case Runs(member):
                self._tell_of(event)
            case Exited(member):
                self._running.pop(member, None)
                self._tell_of(event)
        self._around.take(event)

    def _tell_of(self, event: Exited | Runs) -> None:
        """Tell the scheduler of a process on another host; it knows those on its own."""
        if self._host_of.get(SCHEDULER) != self._host_of[event.member]:
            told = replace(event, detail="") if isinstance(event, Exited) else event  # the line must fit the pipe
            self.tell_scheduler(words_of(told))

    def _lose(self, link: AgentLink) -> None:
        """Count the processes of a host that is gone as failed, workers first: servers may exit because of them.

        So are those that its agent was told to start, and said nothing about.
        """
        there = [member for member in self._running if self._host_of[member] == link.host]
        why = self._request.explain(self._hosts[link.host], link) if there else ""
        for member in sorted(there, key=lambda member: member.role != "worker"):
            self._happened(link, Exited(member, LOST_CODE, why))


def _named(line: list[Any]) -> Collection[ProcessName]:
    """Return the processes that a line is about."""
    match line:
        case ["out" | "closed", str() as role, int() as rank, *_]:
            return (ProcessName(role, rank),)
        case ["living" | "stopped", list() as given]:
            return members(given)
        case [_, [str() as role, int() as rank], *_]:
            return (ProcessName(role, rank),)
    return ()


def _interfaces(plan: JobPlan) -> dict[str, list[str]]:
    """Return the interfaces that the processes of each host use, the scheduler's first."""
    found: dict[str, list[str]] = {host.name: [] for host in plan.hosts}
    for process in plan:
        wanted = process.env.get("PACELINE_INTERFACE")
        if isinstance(wanted, str) and wanted not in found[process.host]:
            found[process.host].append(wanted)
    return found
