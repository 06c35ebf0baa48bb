"""Cut a process's output into lines. Pure, on bytes: no function here assumes an encoding."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

#: A process that never ends its line is cut here, so that it cannot fill the launcher's memory.
LONGEST_LINE = 64 * 1024

Source = TypeVar("Source", bound=Hashable)

_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)


class Line(NamedTuple):
    r"""A line and how it ended: ``\n``, or ``\r`` when the next one overwrites it (a progress bar)."""

    text: bytes
    end: bytes


class LineSplitter:
    """Collects the bytes of one stream and gives them back as lines."""

    def __init__(self) -> None:
        self._pending = b""
        self._overwriting = False

    def feed(self, data: bytes) -> list[Line]:
        """Take in the next bytes and return the lines they complete."""
        self._pending += data
        lines, start = [], 0
        for match in _END.finditer(self._pending):
            end = b"\r" if match.group() == b"\r" else b"\n"
            lines.append(Line(self._pending[start : match.start()], end))
            start = match.end()
        self._pending = self._pending[start:]
        while len(self._pending) > LONGEST_LINE:
            lines.append(Line(self._pending[:LONGEST_LINE], b"\n"))
            self._pending = self._pending[LONGEST_LINE:]
        if lines:
            self._overwriting = lines[-1].end == b"\r"
        return lines

    def preview(self) -> bytes:
        """Return the unfinished line if it overwrites the one before: the present state of a progress bar."""
        return self._pending.rstrip(b"\r") if self._overwriting else b""

    def close(self) -> list[Line]:
        """Return the last line, if the stream ended without ending it."""
        rest, self._pending = self._pending.rstrip(b"\r"), b""
        return [Line(rest, b"\n")] if rest else []


_BEGIN = b"Traceback (most recent call last):"
_LONGEST_TRACEBACK = 500  # lines
_MOST_TRACEBACKS = 100
#: Between the tracebacks of a chain.
_LINKS = (
    b"",
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)


class Tracebacks(Generic[Source]):
    """Passes lines on; a traceback that another process has shown already becomes one line."""

    def __init__(self) -> None:
        self._shown: dict[tuple[Line, ...], Source] = {}
        self._held: dict[Source, list[Line]] = {}
        self._replaced: set[Source] = set()

    def feed(self, source: Source, line: Line) -> list[Line]:
        """Take in a line of a process and return what to show; a traceback is held until its last line."""
        held = self._held.get(source)
        if held is None and line.text != _BEGIN:
            if source in self._replaced and line.text in _LINKS:
                return []
            self._replaced.discard(source)
            return [line]
        held = self._held.setdefault(source, [])
        held.append(line)
        is_inside = len(held) == 1 or line.text.startswith(b" ")
        return [] if is_inside and len(held) < _LONGEST_TRACEBACK else self._whole(source)

    def close(self, source: Source) -> list[Line]:
        """Return the held lines of a process that has ended."""
        self._replaced.discard(source)
        return self._held.pop(source, [])

    def _whole(self, source: Source) -> list[Line]:
        held = self._held.pop(source)
        first = self._shown.setdefault(tuple(held), source)
        if len(self._shown) > _MOST_TRACEBACKS:
            del self._shown[next(iter(self._shown))]
        if first == source:
            return held
        if source in self._replaced:  # a further one of the same chain
            return []
        self._replaced.add(source)
        return [Line(f"(the same traceback as {first})".encode(), b"\n")]


class LastLines:
    """The last lines of a process as a terminal would show them: overwritten ones leave no trace."""

    def __init__(self, length: int = 30, width: int = 1000) -> None:
        self._lines: deque[Line] = deque(maxlen=length)
        self._width = width

    def add(self, line: Line) -> None:
        """Take in one more line; its text is cut to the width."""
        if self._lines and self._lines[-1].end == b"\r":
            last = self._lines.pop()
            if not line.text:
                line = Line(last.text, line.end)
        if line.text or line.end == b"\n":
            self._lines.append(Line(line.text[: self._width], line.end))

    def lines(self) -> list[bytes]:
        """Return the texts, oldest first."""
        return [line.text for line in self._lines]
