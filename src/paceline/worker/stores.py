"""The stores of one worker: the open ones, and records of closed ones. Pure."""

from __future__ import annotations

import itertools
from typing import Protocol
from weakref import WeakValueDictionary


class Store(Protocol):
    """The methods of a store that the table calls."""

    @property
    def name(self) -> str:
        """The servers' name for it."""

    def pause(self) -> None:
        """Tell the servers that no worker shall wait for this worker's pushes until all workers have paused."""

    def go_away(self) -> None:
        """Tell the servers that no worker shall wait for this worker's pushes until it comes back."""

    def come_back(self) -> None:
        """Tell the servers that others in this worker's phase wait for its pushes again."""

    def finish(self) -> None:
        """Wait for this worker's own requests."""

    @property
    def elements(self) -> int:
        """Number of elements of all its values."""


class WorkerStores:
    """The stores of one worker, by the names that the servers know.

    Attributes:
        phase: phase in which this worker has come back last; a store that opens later begins with it.
    """

    def __init__(self) -> None:
        self.phase = 0
        self._open: list[Store] = []
        self.closed: WeakValueDictionary[str, Store] = WeakValueDictionary()
        """Closed stores, by name, that the process still holds: only their holders can send requests on them."""
        self._times_closed: dict[str, int] = {}
        """By namespace that the user has named."""
        self._numbers = itertools.count()

    def name_for(self, namespace: str | None) -> str:
        """Return the name of a new store: of a namespace, after each close another one; without one a new number.

        Workers do not close a store at the same moment. The next opener of the namespace must not meet the old store.
        Numbers begin with the job: a process that was in another job before meets those that were not.
        """
        if not namespace:
            return f"kv{next(self._numbers)}"
        closed = self._times_closed.setdefault(namespace, 0)
        return f"{namespace}#{closed + 1}" if closed else namespace

    def add(self, store: Store) -> None:
        """Take in a new store."""
        self._open.append(store)

    def remove(self, store: Store) -> None:
        """Note that a store is closed. Idempotent."""
        if store not in self._open:
            return
        self._open.remove(store)
        self.closed[store.name] = store
        namespace, _, number = store.name.partition("#")
        if namespace in self._times_closed and (number.isdigit() or not number):
            self._times_closed[namespace] += 1

    @property
    def elements(self) -> int:
        """Number of elements of the values of all open stores."""
        return sum(store.elements for store in self._open)

    def pause(self) -> None:
        """Pause all open stores."""
        for store in list(self._open):
            store.pause()

    def go_away(self) -> None:
        """Tell the servers of all open stores that no worker shall wait for this worker."""
        for store in list(self._open):
            store.go_away()

    def come_back(self, phase: int) -> None:
        """Step with the workers of a phase from the next round on, in all open stores. Idempotent."""
        if phase > self.phase:
            self.phase = phase
            for store in list(self._open):
                store.come_back()

    def finish(self) -> None:
        """Finish all open stores."""
        for store in list(self._open):
            store.finish()
