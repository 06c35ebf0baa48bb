"""Barriers and gathers: requests that are answered when all workers have made them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from paceline.membership.effects import Action, Answer, MemberKey, Waiting
from paceline.membership.losses import Losses
from paceline.membership.replacements import LetIn
from paceline.wire import messages as m
from paceline.wire.limits import MAX_GATHER_BYTES


class Barriers:
    """The barriers and gathers of a job, by name. They count identities: a worker that asks again counts once."""

    def __init__(self, num_workers: int, left: Callable[[str], Collection[MemberKey]]) -> None:
        self._num_workers, self._left = num_workers, left
        self._inside: dict[str, dict[MemberKey, Waiting]] = {}
        self._stores: dict[str, str] = {}
        """Store of each barrier that belongs to one store."""

    def enter(self, name: str, key: MemberKey, waiting: Waiting, store: str = "") -> None:
        """Note that a worker has come; the last of its requests is answered."""
        self._inside.setdefault(name, {})[key] = waiting
        if store:
            self._stores[name] = store

    def missing(self, name: str, wanted: Collection[MemberKey]) -> set[MemberKey]:
        """Return the wanted workers for which a barrier waits."""
        present = set(self._inside.get(name, ()))
        if name in self._stores:
            present.update(self._left(self._stores[name]))
        return set(wanted) - present

    def where(self, key: MemberKey) -> str:
        """Return the barrier at which a member waits, or nothing."""
        return next((name for name, inside in self._inside.items() if key in inside), "")

    def opened(
        self, wanted: Collection[MemberKey], losses: Losses, kept: Collection[str] = (), found: LetIn | None = None
    ) -> list[Action]:
        """Open the barriers that all wanted workers have entered; returns the answers.

        Args:
            wanted: the workers that count.
            losses: those that are gone.
            kept: names that stay closed.
            found: workers that count from now on.
        """
        complete = [name for name in self._inside if name not in kept and not self.missing(name, wanted)]
        return [action for name in complete for action in self._open(name, self._inside.pop(name), losses, found)]

    def cuts(self, wanted: Collection[MemberKey]) -> tuple[list[str], str]:
        """Return the gathers that all wanted workers have entered, and that let workers in; and why not."""
        complete = [name for name in self._inside if not self.missing(name, wanted)]
        cuts = [name for name in complete if all(one.lets_in for one in self._inside[name].values())]
        return cuts, next((one.why_shut for name in cuts for one in self._inside[name].values() if one.why_shut), "")

    def let_in(self, wanted: Collection[MemberKey], losses: Losses, found: LetIn) -> list[Action]:
        """Open the gathers in which the wanted workers have waited until others count; returns the answers."""
        cuts, _ = self.cuts(wanted)
        others = [name for name in self._inside if name not in cuts]
        return self.opened(wanted, losses, others, found)

    def _open(self, name: str, inside: dict[MemberKey, Waiting], losses: Losses, found: LetIn | None) -> list[Action]:
        """Answer all workers that have come; in a gather each gets the bytes of all."""
        self._stores.pop(name, None)
        size = sum(len(one.payload or b"") for one in inside.values())
        came, phase = ({}, 0) if found is None else (found.rounds, found.phase)
        gone = sorted({**losses.rounds, **came}.items())
        dead = [rank for rank, _ in gone if rank in losses.deaths or rank in losses.noticed]
        mixed = len({one.pauses for one in inside.values()}) > 1
        entered = m.Gathered([], gone, dead, mixed) if gone or mixed else m.Done()
        gathered: m.Reply
        if size > MAX_GATHER_BYTES:
            text = f"gather {name!r}: the workers said {size} bytes together; at most {MAX_GATHER_BYTES} are possible"
            gathered = m.Failed("RemoteError", text)
        else:
            by_rank = {rank: one.payload or b"" for (_, rank), one in inside.items()}
            payloads = [by_rank.get(rank, b"") for rank in range(self._num_workers)]
            gathered = m.Gathered(payloads, gone, dead, came=sorted(came), phase=phase)
        return [Answer(one.peer, one.seq, entered if one.payload is None else gathered) for one in inside.values()]

    def clear(self) -> list[Waiting]:
        """Forget all barriers; returns the requests that wait at one."""
        waiting = [one for inside in self._inside.values() for one in inside.values()]
        self._inside.clear()
        self._stores.clear()
        return waiting

    def entered(self) -> set[MemberKey]:
        """Return the members that wait at a barrier and not in a gather."""
        return {key for inside in self._inside.values() for key, one in inside.items() if one.payload is None}

    def members(self) -> set[MemberKey]:
        """Return the members that wait at any barrier."""
        return {key for inside in self._inside.values() for key in inside}
