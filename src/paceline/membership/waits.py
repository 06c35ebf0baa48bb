"""Requests that the scheduler answers later: barriers, gathers, lookups of keys, and samples of a pool. Pure."""

from __future__ import annotations

from collections.abc import Collection

from paceline.membership.barriers import Barriers
from paceline.membership.effects import Action, Answer, MemberKey, Waiting, refuse
from paceline.membership.log import MembershipLog
from paceline.membership.losses import Losses
from paceline.membership.pools import Pools
from paceline.membership.replacements import LetIn, Replacements
from paceline.membership.roster import Roster
from paceline.wire import messages as m
from paceline.wire.limits import MAX_KEYS

#: Requests that may wait. Once a member has died, they are answered with that.
MAY_WAIT = (m.Enter, m.Gather, m.Join, m.Lookup, m.TakeSamples, m.AwaitSamples)


class Waits:
    """The requests of members that wait at the scheduler."""

    def __init__(
        self, num_workers: int, roster: Roster, losses: Losses, replacements: Replacements, log: MembershipLog
    ) -> None:
        self._roster, self._losses, self._replacements = roster, losses, replacements
        self.directory = Directory()
        self.barriers = Barriers(num_workers, self.directory.left)
        self.pools = Pools(num_workers, log)
        self._has_started = False

    def handle(self, key: MemberKey, peer: bytes, seq: int, body: m.Body, now: float) -> list[Action]:
        """Carry out one request of a member; returns the answers that are due."""
        self.pools.now = now
        match body:
            case m.Enter():
                return self._enter(key, Waiting(peer, seq, pauses=body.pauses), body.barrier, body.store, body.round)
            case m.Gather():
                waiting = Waiting(peer, seq, payload=body.payload, lets_in=body.lets_in, why_shut=body.why_shut)
                return self._enter(key, waiting, body.barrier)
            case m.Join():
                return [*self._replacements.ready(key[1], Waiting(peer, seq)), *self._opened()]
            case m.Publish():
                self._losses.note_store(body.goes_on)
                return [Answer(peer, seq, m.Done()), *self.directory.publish(body.store, body.blocks)]
            case m.Lookup():
                return self.directory.look_up(body.store, Waiting(peer, seq, frozenset(body.keys)))
            case m.TakeSamples() | m.AwaitSamples() | m.ReturnSamples() | m.AskSamples():
                return self._take_samples(key, Waiting(peer, seq), body)
            case m.Leave():
                self.directory.leave(body.store, key)
                opened = self._opened()
                self.directory.forget(self._roster.expected())
                return [Answer(peer, seq, m.Done()), *opened]
            case m.AskAbsent():
                missing = self.barriers.missing(body.barrier, self._roster.expected())
                return [Answer(peer, seq, m.Missing(sorted(rank for _, rank in missing)))]
        return [refuse(peer, seq, f"the scheduler does not take {type(body).__name__}")]

    def _enter(self, key: MemberKey, waiting: Waiting, name: str, store: str = "", round: int = 0) -> list[Action]:
        if key[0] != "worker":
            return [refuse(waiting.peer, waiting.seq, f"barriers and gathers are for workers, not for a {key[0]}")]
        self.barriers.enter(name, key, waiting, store)
        return [*self.pools.pushed(key[1], round), *self._opened()]

    def _take_samples(
        self, key: MemberKey, waiting: Waiting, body: m.TakeSamples | m.AwaitSamples | m.ReturnSamples | m.AskSamples
    ) -> list[Action]:
        if key[0] != "worker":
            return [refuse(waiting.peer, waiting.seq, f"samples are for workers, not for a {key[0]}")]
        if isinstance(body, m.TakeSamples):
            return self.pools.take(key[1], waiting, body)
        if isinstance(body, m.ReturnSamples):
            return self.pools.give_back(key[1], waiting, body)
        if isinstance(body, m.AskSamples):
            return self.pools.rest(key[1], waiting, body)
        return self.pools.wait(key[1], waiting, body)

    def start(self) -> list[Action]:
        """Note that all members have joined; returns the answers of the barriers that are complete."""
        self._has_started = True
        return self._opened()

    def go_on_without(self, rounds: dict[int, int]) -> list[Action]:
        """Wait no more for workers that have left or died.

        Args:
            rounds: the last round that counts, by rank; their roster say already that they are gone.
        """
        self.directory.forget(self._roster.expected())
        given = [action for rank, round in rounds.items() for action in self.pools.leave(rank, round)]
        return [*self._opened(), *given]

    def _opened(self) -> list[Action]:
        """Open the barriers that every live worker has entered, once all members have joined.

        A gather that lets workers in stays closed until the servers let those count that are ready.
        """
        if not self._has_started:
            return []
        wanted = self._roster.expected()
        cuts, why_shut = self.barriers.cuts(wanted)
        if why_shut:
            return [*self._replacements.refuse(why_shut), *self.barriers.opened(wanted, self._losses)]
        if cuts and (self._replacements.is_letting_in or self._replacements.begin(self._round())):
            return self.barriers.opened(wanted, self._losses, cuts)
        return self.barriers.opened(wanted, self._losses)

    def _round(self) -> int:
        return max((one.round for one in self._roster.of_role("worker") if one.counts), default=0)

    def let_in(self, wanted: Collection[MemberKey], found: LetIn) -> list[Action]:
        """Open the gathers in which these workers have waited until others count; returns the answers."""
        for rank in found.rounds:
            self.pools.rejoin(rank, found.phase)
        return self.barriers.let_in(wanted, self._losses, found)

    def clear(self) -> list[Waiting]:
        """Forget the requests that wait; returns them."""
        return [*self.barriers.clear(), *self.directory.clear(), *self.pools.clear()]

    def missing_for(self, key: MemberKey) -> list[int]:
        """Return the ranks of the workers that a member waits for at a barrier."""
        name = self.barriers.where(key)
        return sorted(rank for _, rank in self.barriers.missing(name, self._roster.expected())) if name else []

    def check(self, is_failed: bool) -> None:
        """Assert the invariants."""
        waiting = self.barriers.members()
        assert waiting <= set(self._roster), "a process that is no member waits at a barrier"
        assert not (is_failed and (waiting or self.directory.has_lookups)), "a request waits for a dead member"


class Directory:
    """The published blocks of each store."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[m.BlockSpec]] = {}
        self._lookups: dict[str, list[Waiting]] = {}
        self._left: dict[str, set[MemberKey]] = {}
        """Workers that have left a store, while others are still in it."""

    def publish(self, store: str, blocks: list[m.BlockSpec]) -> list[Action]:
        """Add blocks that are new; returns the answers to the lookups that waited for them."""
        known = self._blocks.setdefault(store, [])
        numbers = {spec.block for spec in known}
        known.extend(spec for spec in blocks if spec.block not in numbers)
        return self._found(store)

    def look_up(self, store: str, waiting: Waiting) -> list[Action]:
        """Answer a lookup, now or when its keys are published."""
        waits = [one for lookups in self._lookups.values() for one in lookups if one.peer == waiting.peer]
        if (count := sum(len(one.keys) for one in waits)) + len(waiting.keys) > MAX_KEYS:
            text = f"a lookup of {len(waiting.keys)} keys, when those of {count} wait; at most {MAX_KEYS} are possible"
            return [refuse(waiting.peer, waiting.seq, text)]
        self._lookups.setdefault(store, []).append(waiting)
        return self._found(store)

    def _found(self, store: str) -> list[Action]:
        blocks = self._blocks.get(store, [])
        published = {spec.name for block in blocks for spec in block.keys}
        actions: list[Action] = []
        for waiting in [one for one in self._lookups.get(store, []) if one.keys <= published]:
            self._lookups[store].remove(waiting)
            if not self._lookups[store]:
                del self._lookups[store]
            wanted = waiting.keys or published
            found = [block for block in blocks if any(spec.name in wanted for spec in block.keys)]
            actions.append(Answer(waiting.peer, waiting.seq, m.Found(found)))
        return actions

    def leave(self, store: str, key: MemberKey) -> None:
        """Note that a worker has left a store."""
        self._left.setdefault(store, set()).add(key)

    def left(self, store: str) -> set[MemberKey]:
        """Return the workers that have left a store."""
        return self._left.get(store, set())

    def forget(self, present: Collection[MemberKey]) -> None:
        """Forget the stores that all present workers have left."""
        for store in [name for name, left in self._left.items() if left.issuperset(present)]:
            del self._left[store]
            self._blocks.pop(store, None)

    def clear(self) -> list[Waiting]:
        """Forget all lookups; returns the requests that wait for one."""
        waiting = [one for lookups in self._lookups.values() for one in lookups]
        self._lookups.clear()
        return waiting

    @property
    def has_lookups(self) -> bool:
        """Whether a lookup waits."""
        return bool(self._lookups)
