"""Whom a late request waits for, and whether they get on.

A deadline judges those who do not move, not those who are slow: a worker within its local steps, a push on a slow link.

| late request | waits for |
|---|---|
| push, norm of a round | the workers that have not pushed |
| meeting, barrier, gather | the workers that have not come |
| being let in | the other workers |
| any other; a push that its server has not got yet | its asker and the server that answers |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.net.call import Call
from paceline.net.client import Client
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: Longest time to find out which workers are missing, for the error of a deadline, in seconds.
MISSING_TIMEOUT_S = 5.0


def questions_about(request: m.Request | None) -> list[m.Request]:
    """Return the requests that find out which workers a request waits for; none: it waits for no worker."""
    if isinstance(request, m.Push):
        return [m.AskMissing(request.store, request.entries[0])]
    if isinstance(request, m.AskNorm):
        return [m.AskMissing(request.store, entry) for entry in request.entries]
    if isinstance(request, m.Meet):
        return [m.AskNotMet(request.group, request.number, request.members)]
    if isinstance(request, m.Enter | m.Gather):
        return [m.AskAbsent(request.barrier)]
    return []


def withdrawals(request: m.Request, servers: Sequence[int]) -> list[tuple[int, m.Request]]:
    """Return what tells servers to keep nothing more of a request that waits for other workers; not of a push."""
    match request:
        case m.Meet(group=group) | m.TakeAny(group=group):  # the meetings of an operation are at several servers
            return [(server, m.GiveUp(group)) for server in servers]
        case m.UseBoard(verb="get", names=names):
            return [(0, m.UseBoard("forget", names, []))]
    return []


def missing_in(answers: Iterable[m.Body | None]) -> tuple[list[int], list[str]]:
    """Return the workers that answers name, and what happened to the keys of pushes."""
    known = [one for one in answers if isinstance(one, m.Missing)]
    return sorted({rank for one in known for rank in one.workers}), [one.story for one in known if one.story]


@dataclass(frozen=True)
class Awaited:
    """The processes that a request waits for."""

    members: Sequence[tuple[m.Member, m.MemberState]] = ()
    have_come: bool = False
    """The server says that no worker is missing: the last one has come, and the answer is on its way."""

    @classmethod
    def of(cls, status: m.Status, wanted: Iterable[tuple[str, int]], have_come: bool = False) -> Awaited:
        """Return the members of some roles and ranks."""
        found = set(wanted)
        pairs = zip(status.members, status.states, strict=True)
        return cls([(member, state) for member, state in pairs if (member.role, member.rank) in found], have_come)

    @property
    def still_s(self) -> float:
        """Seconds since the last one of them has got on that has for least; infinite: one never did."""
        times = [one.still_s for _, one in self.members]
        return max((float("inf") if one is None else one for one in times), default=float("inf"))

    def has(self, worker: int) -> bool:
        """Return whether a worker is among them: it waits for its own message, or the answer."""
        return any((member.role, member.rank) == ("worker", worker) for member, _ in self.members)

    def __str__(self) -> str:
        """Return who they are, for an error."""
        return ", ".join(_said(member, state) for member, state in self.members if member.role == "worker")


class LateRequests:
    """How much longer late requests of one wait may take, by what is found out each time that one is late. Pure.

    | found | rest |
    |---|---|
    | its own message begins anew with each connection | none: it comes to no end, however many of its bytes travel |
    | all workers have come, for the first time | the whole limit: the answer is on its way |
    | anything else | the limit, without the time since the processes that it waits for have got on |

    Args:
        limit_s: longest time without anything new, in seconds.
        worker: rank of the asker.
    """

    def __init__(self, limit_s: float, worker: int) -> None:
        self._limit_s, self._worker = limit_s, worker
        self._seen: dict[tuple[int, int], tuple[int, bool]] = {}
        """By channel and number of a request: connections so far when it was late last, and whether all had come."""

    def rest_s(self, request: tuple[int, int], whom: Awaited, connections: int) -> float:
        """Return how many seconds are left, 0 or less: none.

        Args:
            request: channel and number of the late one.
            whom: the processes that it waits for.
            connections: how often its channel was connected anew.
        """
        before, had_come = self._seen.get(request, (connections, False))
        self._seen[request] = connections, had_come or whom.have_come
        if before < connections and whom.has(self._worker):
            return 0.0
        return self._limit_s if whom.have_come and not had_come else self._limit_s - whom.still_s


def _said(member: m.Member, state: m.MemberState) -> str:
    where = f"{member.role} {member.rank} on {member.host} (pid {member.pid})"
    heard = f"sent its last heartbeat {state.silent_s:.1f} s ago"
    return f"{where}, which is at round {state.round} and {heard}"


def whom_it_waits_for(
    late: Call, client: Client, ask_status: Callable[[], m.Body], between: tuple[int, int]
) -> tuple[Awaited, str]:
    """Ask who holds up a push, a norm, a barrier or a gather; returns them, and a text for the error.

    The story of the push goes to the log, at level DEBUG.

    Args:
        late: the request.
        client: has sent it.
        ask_status: returns the scheduler's status.
        between: rank of the asker, and of the server that it has asked.
    """
    questions = questions_about(late.request if late.seq else None)
    try:
        asked = [client.ask(late.channel, one, "asking who is missing") for one in questions]
        status = ask_status()
        # A question waits until the message has left that is under way on its connection.
        is_told = bool(asked) and client.wait(asked, MISSING_TIMEOUT_S) is None
    except PacelineError as error:
        return Awaited(), f" ({error})"
    assert isinstance(status, m.Status)
    missing, stories = missing_in(one.body for one in asked)
    for story in stories:
        logger.debug("worker %d: %s", between[0], story)
    if isinstance(late.request, m.Join):
        missing = [one.rank for one in status.members if one.role == "worker" and one.rank != between[0]]
    wanted = [("worker", rank) for rank in missing] or [("worker", between[0]), ("server", between[1])]
    found = Awaited.of(status, wanted, is_told and not missing)
    return found, f"; it waits for {found if missing else 'nobody'}" if is_told or missing else ""
