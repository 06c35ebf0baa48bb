"""Where keys are: blocks that worker 0 publishes, and lookups that wait for them."""

from __future__ import annotations

from collections.abc import Collection

from paceline.membership.effects import Action, Answer, MemberKey, Waiting
from paceline.wire import messages as m


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
