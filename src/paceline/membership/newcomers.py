"""How processes become members: their first words, and the welcome of all when the last one has come. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from paceline.membership.effects import Action, Answer, MemberKey, Waiting, refuse
from paceline.membership.ending import Ending
from paceline.membership.replacements import Replacements
from paceline.membership.roster import MemberRecord, Roster, member_of
from paceline.wire import messages as m


class Newcomers:
    """Takes processes into a job.

    Args:
        roster: the members.
        ending: why none may come any more.
        replacements: take over from workers that have died.
        new_token: makes the secret by which a member claims its further connections.
        pid: process id of the scheduler; 0: not known.
        host_id: id of the scheduler's host.

    Attributes:
        complete: all members have joined.
    """

    def __init__(
        self,
        roster: Roster,
        ending: Ending,
        replacements: Replacements,
        new_token: Callable[[], bytes],
        pid: int = 0,
        host_id: str = "",
    ) -> None:
        self._roster, self._ending, self._replacements, self._new_token = roster, ending, replacements, new_token
        self._pid, self._host_id = pid, host_id
        self.complete = False

    def hello(self, peer: bytes, seq: int, hello: m.Hello, now: float) -> list[Action]:
        """Take in a process, or one of a member again, whose first answer may have got lost; returns the answers."""
        known = self._roster.of(peer)
        if known is not None:
            return self._again(peer, seq, known)
        reason = self._roster.objection(hello, self._ending.is_under_way, self._ending.deaths)
        if reason:
            return [Answer(peer, seq, m.Failed("RendezvousError", reason))]
        if self._roster.takes_over(hello):
            self._replacements.hello(peer, seq, hello)
            return []
        rank = hello.rank if hello.rank >= 0 else self._roster.free_rank(hello.role)
        self._roster.add(MemberRecord(member_of(hello, rank, self._new_token()), peer, now, seq))
        return []

    def welcome_all(self, now: float) -> list[Action]:
        """Welcome all members, if the last one has come since the last call; returns the answers."""
        if self.complete or not self._roster.complete:
            return []
        self.complete = True
        for record in self._roster.values():
            record.heard = now  # from here on they send heartbeats
        return [Answer(record.peer, record.seq, self._welcome(key)) for key, record in self._roster.items()]

    def take_over(self, servers: Collection[int], now: float) -> list[Action]:
        """Take in a process whose predecessor is gone, and welcome those that all these servers know."""
        self._replacements.turn(self._new_token, now)
        return [self._welcomed(record, now) for record in self._replacements.welcomes(servers)]

    def _welcomed(self, record: MemberRecord, now: float) -> Answer:
        record.heard = now
        return Answer(record.peer, record.seq, self._welcome((record.member.role, record.member.rank)))

    def _again(self, peer: bytes, seq: int, key: MemberKey) -> list[Action]:
        record = self._roster[key]
        if record.peer != peer:
            return [refuse(peer, seq, f"this connection is not the lifeline of {record}")]
        record.seq = seq
        if self.complete and not record.joining:
            return [Answer(peer, seq, self._welcome(key))]
        return self._ending.failures_for([Waiting(peer, seq)])

    def _welcome(self, key: MemberKey) -> m.Welcome:
        return m.Welcome(key[1], self._roster.known_to(key), self._pid, self._host_id)

    def claim(self, peer: bytes, seq: int, claim: m.Claim) -> Answer:
        """Note a further connection of a member."""
        if not self._roster.claim(peer, claim):
            return refuse(peer, seq, f"the claim to be {claim.role} {claim.rank} has the wrong token")
        return Answer(peer, seq, m.Done())
