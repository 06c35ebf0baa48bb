"""What has arrived, from the threads that read connections to the thread that uses it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Source = TypeVar("Source")

#: Messages and bytes (of the last message more) taken in one go: no peer can starve the rest of a loop.
BURST, BURST_BYTES = 256, 16 * 1024 * 1024


@dataclass(frozen=True)
class _Arrived(Generic[Source]):
    source: Source
    frames: Sequence[Any]
    size: int
    room: threading.Semaphore


class ReceivedQueue(Generic[Source]):
    """A queue of messages that one thread takes, and that anybody can make it look at."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Arrived[Source] | None] = queue.SimpleQueue()
        self._watchers: list[ReceivedQueue[Any]] = []

    def put(self, source: Source, frames: Sequence[Any], size: int, room: threading.Semaphore) -> None:
        """Add a message; ``room`` is released when it is taken."""
        self._queue.put(_Arrived(source, frames, size, room))
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        for watcher in self._watchers:
            watcher.wake()

    def add_watcher(self, other: ReceivedQueue[Any]) -> None:
        """Wake another inbox for everything that arrives here."""
        self._watchers.append(other)

    def wake(self) -> None:
        """Make :meth:`take` return now."""
        self._queue.put(None)

    def take(self, timeout_s: float) -> list[tuple[Source, Sequence[Any]]]:
        """Return what has arrived, after waiting at most ``timeout_s`` for the first."""
        taken: list[tuple[Source, Sequence[Any]]] = []
        room = BURST_BYTES
        try:
            one = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
            while True:
                if one is not None:
                    one.room.release()
                    taken.append((one.source, one.frames))
                    room -= one.size
                if len(taken) >= BURST or room <= 0:
                    break
                one = self._queue.get_nowait()
        except queue.Empty:
            pass
        if not self._queue.empty():
            # What stays here has woken the watchers already, and they may sleep again.
            self._wake_watchers()
        return taken
