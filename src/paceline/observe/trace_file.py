"""Files of Chrome traces: whole JSON after every write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class TraceFile:
    """Writes events.

    Args:
        head: fields that stand before the events; None: the file is an array of events.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: str | Path, head: Mapping[str, Any] | None = None) -> None:
        self._file = Path(path).open("w")  # noqa: SIM115 (it stays open)
        self._end = "\n]\n" if head is None else "\n]}\n"
        self._comma = ""
        fields = "" if head is None else json.dumps(head)[:-1] + ', "traceEvents": '
        self._file.write(fields + "[" + self._end)

    def write(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Add events."""
        self._file.seek(self._file.tell() - len(self._end))
        for event in events:
            self._file.write(f"{self._comma}\n{json.dumps(event)}")
            self._comma = ","
        self._file.write(self._end)
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()
