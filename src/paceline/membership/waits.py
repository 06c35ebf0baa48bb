"""Requests that the scheduler answers later: barriers, gathers, lookups of keys, and samples of a pool. Pure."""

from __future__ import annotations

from paceline.membership.barriers import Barriers
from paceline.membership.directory import Directory
from paceline.membership.effects import Action, Answer, MemberKey, Waiting, refuse
from paceline.membership.losses import Losses
from paceline.membership.pools import Pools
from paceline.membership.roster import Roster
from paceline.wire import messages as m

#: Requests that may wait. Once a member has died, they are answered with that.
MAY_WAIT = (m.Enter, m.Gather, m.Lookup, m.TakeSamples, m.AwaitSamples)


class Waits:
    """The requests of members that wait at the scheduler.

    Args:
        num_workers: number of workers of the job.
        roster: the members.
        losses: the workers that have left or died.
    """

    def __init__(self, num_workers: int, roster: Roster, losses: Losses) -> None:
        self._roster, self._losses = roster, losses
        self._directory = Directory()
        self._barriers = Barriers(num_workers, self._directory.left)
        self._pools = Pools(num_workers)
        self._has_started = False

    def handle(self, key: MemberKey, peer: bytes, seq: int, body: m.Body, now: float) -> list[Action]:
        """Carry out one request of a member; returns the answers that are due."""
        self._pools.now = now
        match body:
            case m.Enter():
                return self._enter(key, Waiting(peer, seq, pauses=body.pauses), body.barrier, body.store, body.round)
            case m.Gather():
                return self._enter(key, Waiting(peer, seq, payload=body.payload), body.barrier)
            case m.Publish():
                self._losses.note_store(body.goes_on)
                return [Answer(peer, seq, m.Done()), *self._directory.publish(body.store, body.blocks)]
            case m.Lookup():
                return self._directory.look_up(body.store, Waiting(peer, seq, frozenset(body.keys)))
            case m.TakeSamples() | m.AwaitSamples() | m.ReturnSamples() | m.AskSamples():
                return self._take_samples(key, Waiting(peer, seq), body)
            case m.Leave():
                self._directory.leave(body.store, key)
                opened = self._opened()
                self._directory.forget(self._roster.expected())
                return [Answer(peer, seq, m.Done()), *opened]
            case m.AskAbsent():
                missing = self._barriers.missing(body.barrier, self._roster.expected())
                return [Answer(peer, seq, m.Missing(sorted(rank for _, rank in missing)))]
        return [refuse(peer, seq, f"the scheduler does not take {type(body).__name__}")]

    def _enter(self, key: MemberKey, waiting: Waiting, name: str, store: str = "", round: int = 0) -> list[Action]:
        if key[0] != "worker":
            return [refuse(waiting.peer, waiting.seq, f"barriers and gathers are for workers, not for a {key[0]}")]
        self._barriers.enter(name, key, waiting, store)
        return [*self._pools.pushed(key[1], round), *self._opened()]

    def _take_samples(
        self, key: MemberKey, waiting: Waiting, body: m.TakeSamples | m.AwaitSamples | m.ReturnSamples | m.AskSamples
    ) -> list[Action]:
        if key[0] != "worker":
            return [refuse(waiting.peer, waiting.seq, f"samples are for workers, not for a {key[0]}")]
        if isinstance(body, m.TakeSamples):
            return self._pools.take(key[1], waiting, body)
        if isinstance(body, m.ReturnSamples):
            return self._pools.give_back(key[1], waiting, body)
        if isinstance(body, m.AskSamples):
            return self._pools.rest(key[1], waiting, body)
        return self._pools.wait(key[1], waiting, body)

    def start(self) -> list[Action]:
        """Note that all members have joined; returns the answers of the barriers that are complete."""
        self._has_started = True
        return self._opened()

    def go_on_without(self, rounds: dict[int, int]) -> list[Action]:
        """Wait no more for workers that have left or died.

        Args:
            rounds: the last round that counts, by rank; their roster say already that they are gone.
        """
        self._directory.forget(self._roster.expected())
        given = [action for rank, round in rounds.items() for action in self._pools.leave(rank, round)]
        return [*self._opened(), *given]

    def _opened(self) -> list[Action]:
        """Open the barriers that every live worker has entered, once all members have joined."""
        return self._barriers.opened(self._roster.expected(), self._losses) if self._has_started else []

    def clear(self) -> list[Waiting]:
        """Forget the requests that wait; returns them."""
        return [*self._barriers.clear(), *self._directory.clear(), *self._pools.clear()]

    @property
    def has_lookups(self) -> bool:
        """Whether a worker waits for keys that are not published yet."""
        return self._directory.has_lookups

    @property
    def hands_out(self) -> bool:
        """Whether the job has a pool, from which workers take unequal parts."""
        return self._pools.exist

    @property
    def at_barriers(self) -> set[MemberKey]:
        """The workers that wait at a barrier, not in a gather."""
        return self._barriers.entered()

    def missing_for(self, key: MemberKey) -> list[int]:
        """Return the ranks of the workers that a member waits for at a barrier."""
        name = self._barriers.where(key)
        return sorted(rank for _, rank in self._barriers.missing(name, self._roster.expected())) if name else []

    def check(self, is_failed: bool) -> None:
        """Assert the invariants."""
        waiting = self._barriers.members()
        assert waiting <= set(self._roster), "a process that is no member waits at a barrier"
        assert not (is_failed and (waiting or self.has_lookups)), "a request waits for a dead member"
