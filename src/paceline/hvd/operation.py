"""An operation of this rank, from the call to its result."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from paceline.hvd.execute import Operation


class Handles:
    """Operations by handle, and the wait for them. Thread-safe."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._numbers: Counter[int] = Counter()
        self._operations: dict[int, Operation] = {}
        self._changed = threading.Condition()

    def count(self) -> int:
        """Return a new handle."""
        return next(self._next)

    def number(self, process_set: int) -> int:
        """Return the number of the next call for a process set, by which unnamed operations of its ranks match."""
        with self._changed:
            self._numbers[process_set] += 1
            return self._numbers[process_set]

    def add(self, handle: int, operation: Operation) -> None:
        """Note an operation."""
        self._operations[handle] = operation

    def is_done(self, handle: int) -> bool:
        """Tell whether ``take`` would not wait."""
        found = self._operations.get(handle)
        return found is None or found.done

    def take(self, handle: int, urge: Callable[[], None]) -> Any:
        """Wait for an operation, forget it and return its result; None for an unknown handle.

        Args:
            handle: from :meth:`count`.
            urge: called if there is something to wait for.

        Raises:
            HorovodInternalError: it failed.
        """
        operation = self._operations.pop(handle, None)
        return None if operation is None else self.wait(operation, urge)

    def wait(self, operation: Operation, urge: Callable[[], None]) -> Any:
        """Wait for an operation and return its result.

        Raises:
            HorovodInternalError: it failed.
        """
        if not operation.done:
            urge()
            with self._changed:
                while not operation.done:
                    self._changed.wait()
        return operation.outcome()

    def wake(self) -> None:
        """Wake those that wait, after operations are done."""
        with self._changed:
            self._changed.notify_all()
