"""Other processes that take the rank of a worker that has died, while the others train. Pure.

Each process of a rank is an *incarnation*, numbered from 0. One that takes over goes through these states::

    state     event                                             becomes   answers
    (none)    Hello, and the one before is not gone yet         waits     none
    waits     the one before is gone (:mod:`.losses`)           known     News to the servers, with its token
    known     all live servers know it                          sets up   Welcome
    sets up   Join: its script has come to its loop             ready     News to the workers: somebody is ready
    ready     all workers are in a gather that lets workers in, let in    News to the servers: it counts in a phase
              or no store of the job is in lock step
    let in    all live servers let it count                     counts    Joined to it; the gather opens; in the log
    any       it dies                                           (none)    as any other's death
    any       the job ends                                      (none)    JobOverError

So in lock step it counts between the same two rounds of all workers: none has a push under way in that gather.
Elsewhere the others come to its phase with their next samples of a pool.

A connection of an older incarnation is refused by name. Servers refuse it when they know the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from paceline.membership.effects import Action, Answer, Waiting
from paceline.membership.log import MembershipLog
from paceline.membership.losses import Losses
from paceline.membership.roster import MemberRecord, Roster, member_of
from paceline.wire import messages as m

#: Answer to those who come too late.
_OVER = m.Failed("JobOverError", "the job has ended before this process could join")


@dataclass
class _Newcomer:
    peer: bytes
    seq: int
    hello: m.Hello
    ready: Waiting | None = None
    """Its request to be let in."""
    counts: m.Rejoined | None = None
    """Where it is let in."""
    welcomed: bool = False
    known_to: set[tuple[int, bool]] = field(default_factory=set)
    """Servers that know it, and those that let it count."""


@dataclass(frozen=True)
class LetIn:
    """Workers that count from now on."""

    rounds: dict[int, int]
    """By rank, the last round of the process before."""
    phase: int
    answers: list[Action]


class Replacements:
    """The replacements that do not count yet, and those that do."""

    def __init__(self, roster: Roster, losses: Losses, log: MembershipLog) -> None:
        self._roster, self._losses, self._log = roster, losses, log
        self._new: dict[int, _Newcomer] = {}
        self._counting: dict[int, m.Rejoined] = {}
        self._has_news = False

    # ---- events ----------------------------------------------------------------------------------------------------

    def hello(self, peer: bytes, seq: int, hello: m.Hello) -> None:
        """Note a process that wants to take over; :meth:`turn` takes it in."""
        self._new[hello.rank] = _Newcomer(peer, seq, hello)

    def turn(self, new_token: Callable[[], bytes], now: float) -> None:
        """Take in one process whose predecessor is gone; servers are to hear of it."""
        for rank, one in self._new.items():
            record = self._roster["worker", rank]
            if record.gone and record.peer != one.peer:
                member = member_of(one.hello, rank, new_token())
                self._roster.replace(MemberRecord(member, one.peer, now, one.seq, joining=True))
                self._has_news = True
                return

    def ready(self, rank: int, waiting: Waiting) -> list[Action]:
        """Note that a replacement has come to its loop; returns the answer if it is too late."""
        one = self._new.get(rank)
        if one is None:
            return [Answer(waiting.peer, waiting.seq, _OVER)]
        one.ready, self._has_news = waiting, True
        if not self._losses.is_lock_step:
            self.begin(self._losses.rounds.get(rank, 0))
        return []

    def begin(self, round: int) -> bool:
        """Let all count that are ready, after a round, once all servers let them; returns whether there are any."""
        ready = [rank for rank, one in self._new.items() if one.ready is not None and one.counts is None]
        if not ready:
            return False
        why = "restarted by the launcher"
        phase = self._log.add("joins", ready, round, why)
        for rank in ready:
            self._new[rank].counts = m.Rejoined(rank, phase, round)
        self._has_news = True
        return True

    def confirm(self, server: int, taken_in: Iterable[m.TakenIn]) -> None:
        """Note which replacements a server knows, and which of them count there."""
        for said in taken_in:
            one = self._new.get(said.rank)
            if one is not None and one.hello.incarnation == said.incarnation:
                one.known_to |= {(server, False), (server, said.counts)}

    def welcomes(self, servers: Collection[int]) -> list[MemberRecord]:
        """Return the replacements that all these servers know, once each."""
        found = []
        for rank, one in self._new.items():
            record = self._roster["worker", rank]
            if record.joining and not one.welcomed and one.known_to >= {(server, False) for server in servers}:
                one.welcomed = True
                found.append(record)
        return found

    def let_in(self, servers: Collection[int]) -> LetIn | None:
        """Return the replacements that count at all these servers by now; None: there are none."""
        ready = [
            (rank, one) for rank, one in self._new.items()
            if one.counts is not None and one.known_to >= {(server, True) for server in servers}
        ]  # fmt: skip
        if not ready:
            return None
        answers: list[Action] = []
        phase, giver, rounds = 0, self._giver(), dict[int, int]()
        for rank, one in ready:
            assert one.counts is not None
            assert one.ready is not None
            del self._new[rank]
            self._counting[rank], phase = one.counts, one.counts.phase
            record = self._roster["worker", rank]
            record.joining, record.round = False, one.counts.round
            answers.append(Answer(one.ready.peer, one.ready.seq, m.Joined(phase, one.counts.round, giver)))
            rounds[rank] = self._losses.rejoin(rank)
        return LetIn(rounds, phase, answers)

    def refuse(self, why: str) -> list[Action]:
        """Return the answers to those that are ready, and cannot be let in."""
        ready = [one.ready for one in self._new.values() if one.ready is not None and one.counts is None]
        for one in self._new.values():
            one.ready = one.ready if one.counts is not None else None
        return [Answer(one.peer, one.seq, m.Failed("PacelineError", f"it cannot join: {why}")) for one in ready]

    def _giver(self) -> int:
        """Return the worker that gives its state to those who join in lock step: of those that counted before."""
        if not self._losses.is_lock_step:
            return -1
        return min((one.member.rank for one in self._roster.of_role("worker") if one.counts), default=-1)

    def drop(self, member: m.Member) -> None:
        """Forget a replacement that has died; not one that waits for this death."""
        one = self._new.get(member.rank)
        if one is not None and one.hello.incarnation == member.incarnation:
            del self._new[member.rank]
        self._counting.pop(member.rank, None)

    def end(self) -> list[Action]:
        """Return the answers to those who come too late: the job ends."""
        waiting = [Waiting(one.peer, one.seq) for one in self._new.values() if not one.welcomed]
        waiting += [one.ready for one in self._new.values() if one.ready is not None]
        self._new.clear()
        return [Answer(one.peer, one.seq, _OVER) for one in waiting]

    # ---- questions -------------------------------------------------------------------------------------------------

    @property
    def is_letting_in(self) -> bool:
        """Whether workers in a gather wait until servers let somebody count."""
        return any(one.counts is not None for one in self._new.values())

    @property
    def waiting(self) -> list[int]:
        """Ranks of those that are ready and not let in."""
        return sorted(rank for rank, one in self._new.items() if one.ready is not None and one.counts is None)

    def take_news(self) -> bool:
        """Return whether there is something that servers and workers have not heard of."""
        news, self._has_news = self._has_news, False
        return news

    def for_servers(self) -> tuple[list[m.Member], list[m.Rejoined]]:
        """Return the members that are not the first of their rank, and those of them that count."""
        members = [one.member for one in self._roster.of_role("worker") if one.member.incarnation]
        counting = [*self._counting.values(), *(one.counts for one in self._new.values() if one.counts is not None)]
        return members, counting


def former(member: m.Member, now: m.Member) -> m.Death:
    """Return what an older incarnation hears: it counts as dead."""
    said = f"incarnation {member.incarnation} (pid {member.pid}) was replaced by incarnation {now.incarnation}"
    return m.Death(member.role, member.rank, member.host, f"{said} on {now.host} (pid {now.pid})")
