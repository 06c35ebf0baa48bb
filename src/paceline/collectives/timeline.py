"""The timeline: what became of each operation, as a file for chrome://tracing. Rank 0 writes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from paceline.collectives.negotiation.messages import Key, Response
from paceline.observe.trace_file import TraceFile


class Timeline:
    """Writes events while it is on. Thread-safe. The file is a whole JSON array after every event."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: TraceFile | None = None
        self._start = 0.0
        self._numbers: dict[str, int] = {}
        self._negotiating: set[Key] = set()
        self.marks_cycles = False

    @property
    def is_on(self) -> bool:
        """Whether events are written."""
        return self._file is not None

    def open(self, path: str, marks_cycles: bool = False) -> None:
        """Begin a file.

        Raises:
            OSError: it cannot be written.
        """
        self.close()
        with self._lock:
            self._file = TraceFile(path)
            self._start = time.monotonic()
            self.marks_cycles = marks_cycles
            self._numbers, self._negotiating = {}, set()
            epoch = {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}
            self._write({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "timeline"} | epoch})

    def close(self) -> None:
        """End the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    # ---- events ----------------------------------------------------------------------------------------------------

    def reported(self, rank: int, keys: Iterable[Key]) -> None:
        """A rank is ready for operations."""
        if self.is_on:
            with self._lock:
                for key in keys:
                    if key not in self._negotiating:
                        self._negotiating.add(key)
                        self._event(key, "B", f"NEGOTIATE_{key[1].upper()}")
                    self._event(key, "X", str(rank), dur=0)

    def agreed(self, keys: Iterable[Key]) -> None:
        """All ranks are ready for operations, or these have failed."""
        if self.is_on:
            with self._lock:
                for key in self._negotiating.intersection(keys):
                    self._negotiating.discard(key)
                    self._event(key, "E")

    def began(self, responses: Iterable[Response], activity: str) -> None:
        """Operations begin to run."""
        if self.is_on:
            with self._lock:
                for response in responses:
                    self._event(response.request.key, "B", response.request.kind.upper())
                    self._event(response.request.key, "B", activity)

    def ended(self, responses: Iterable[Response]) -> None:
        """Operations have run."""
        if self.is_on:
            with self._lock:
                for request in [response.request for response in responses]:
                    self._event(request.key, "E")
                    what = {"dtype": ", ".join(request.dtypes), "shape": str([list(one) for one in request.shapes])}
                    self._event(request.key, "E", args=what)

    def cycle(self) -> None:
        """A cycle begins."""
        if self.is_on and self.marks_cycles:
            with self._lock:
                self._write({"name": "CYCLE_START", "ph": "i", "pid": 0, "s": "g", "ts": self._now()})

    # ---- the file --------------------------------------------------------------------------------------------------

    def _now(self) -> int:
        return int(1e6 * (time.monotonic() - self._start))

    def _event(self, key: Key, phase: str, name: str = "", **more: Any) -> None:
        text = f"{key[1]}.{key[2]}" + (f" (process set {key[0]})" if key[0] else "")
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._numbers) + 1
            self._write({"name": "process_name", "ph": "M", "pid": number, "args": {"name": text}})
            self._write({"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}})
        event = {"ph": phase, "ts": self._now(), "pid": number} | more
        self._write({"name": name} | event if name else event)

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:  # another thread may have ended it
            self._file.write([event])
