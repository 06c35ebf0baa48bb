"""An operation of this rank, from the call to its result."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.hvd.errors import HorovodInternalError
from paceline.hvd.negotiation import Request


@dataclass(slots=True)
class Operation:
    """A pending or finished operation.

    Attributes:
        request: what is negotiated.
        tensors: this rank's tensors.
        outputs: where results go; None: new tensors.
        finish: makes the result of ``outputs``, in the thread that waits.
        result: see ``finish``; for operations without tensors, what they return.
        error: why it failed.
        done: whether result or error are there.
        received_splits: rows received from each member (alltoall).
        ready: event of the accelerator after which ``tensors`` are complete.
    """

    request: Request
    tensors: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] | None = None
    finish: Callable[[Operation], Any] | None = None
    result: Any = None
    error: str = ""
    done: bool = False
    received_splits: list[int] = field(default_factory=list)
    ready: torch.cuda.Event | None = None


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
        if operation.error:
            raise HorovodInternalError(operation.error)
        return operation.finish(operation) if operation.finish is not None else operation.result

    def wake(self) -> None:
        """Wake those that wait, after operations are done."""
        with self._changed:
            self._changed.notify_all()
