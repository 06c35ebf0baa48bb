"""Goes on without workers that have died, and with those that take over from them. Pure."""

from __future__ import annotations

from collections.abc import Callable

from paceline.membership.effects import Action, Answer, MemberKey, Warn, describe
from paceline.membership.log import MembershipLog
from paceline.membership.losses import Losses
from paceline.membership.newcomers import Newcomers
from paceline.membership.replacements import Replacements
from paceline.membership.roster import MemberRecord, Roster
from paceline.membership.waits import Waits
from paceline.wire import messages as m


class Survivors:
    """The members that go on after a worker's death.

    Args:
        roster: all members.
        losses: the dead workers.
        replacements: take over from them.
        newcomers: welcomes these.
        waits: requests that wait for workers.
        log: the changes of the membership.
        news: returns the news for a member.
    """

    def __init__(
        self,
        roster: Roster,
        losses: Losses,
        replacements: Replacements,
        newcomers: Newcomers,
        waits: Waits,
        log: MembershipLog,
        news: Callable[[MemberRecord], m.News],
    ) -> None:
        self._roster, self._losses, self._replacements, self._newcomers = roster, losses, replacements, newcomers
        self._waits, self._log, self._news = waits, log, news

    def lose(self, death: m.Death) -> list[Action]:
        """Tell all that a worker has died, without which they go on."""
        record = self._roster[death.role, death.rank]
        self._replacements.drop(record.member)
        self._losses.add(death, counted=not record.joining)
        news = [Answer(record.peer, 0, self._news(record)) for record in self._roster.live()]
        return [Warn(f"{describe(death)}; the others go on"), *news]

    def note(self, key: MemberKey, beat: m.Heartbeat, now: float) -> list[Action]:
        """Go on without the workers that all servers have taken out, and with those that all have taken in."""
        if key[0] != "server":
            return []
        out = self._taken_out(key[1], beat) if beat.taken_out else []
        return [*out, *(self._taken_in(key[1], beat, now) if beat.taken_in else [])]

    def _taken_out(self, server: int, beat: m.Heartbeat) -> list[Action]:
        self._losses.taken_out(server, beat.taken_out)
        gone = self._losses.gone(self._servers())
        for rank in gone:
            self._roster["worker", rank].gone = True
            self._log.add("died", [rank], self._losses.rounds[rank], self._losses.deaths[rank].reason)
        return self._waits.go_on_without({rank: self._losses.rounds[rank] for rank in gone}) if gone else []

    def _taken_in(self, server: int, beat: m.Heartbeat, now: float) -> list[Action]:
        self._replacements.confirm(server, beat.taken_in)
        wanted = self._roster.expected()
        found = self._replacements.let_in(self._servers())
        opened = [] if found is None else [*found.answers, *self._waits.let_in(wanted, found)]
        return [*opened, *self.turn(now)]

    def turn(self, now: float) -> list[Action]:
        """Take in and welcome those that take over."""
        return [*self._newcomers.take_over(self._servers(), now), *self.tell()]

    def tell(self) -> list[Action]:
        """Tell servers and workers of those that take over, if there is something new."""
        if not self._replacements.take_news():
            return []
        servers = [one for one in self._roster.of_role("server") if one.live]
        workers = [one for one in self._roster.of_role("worker") if one.counts]
        return [Answer(one.peer, 0, self._news(one)) for one in (*servers, *workers)]

    def _servers(self) -> list[int]:
        return [record.member.rank for record in self._roster.of_role("server") if record.live]
