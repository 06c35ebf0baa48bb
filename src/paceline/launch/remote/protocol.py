"""Lines of JSON between launcher and agent, and the times that count between them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from paceline.launch.plan import ProcessName

#: The agent's first bytes. All output of a login shell comes before them.
MAGIC = b"\x01paceline agent 1\n"

#: Interval of the launcher's pings, and silence after which the other end counts as lost.
PING_S, SILENCE_S = 2.0, 60.0

#: Longest time between two looks at the clock that counts in full. In the rest the own process did not run.
LONGEST_TURN_S = 2 * PING_S


def encode(*words: Any) -> bytes:
    """Return one line."""
    return json.dumps(words).encode() + b"\n"


def text(data: bytes) -> str:
    """Return any bytes as text that :func:`data` turns back."""
    return data.decode("utf-8", "surrogateescape")


def data(text: str) -> bytes:
    """Return the bytes of :func:`text`."""
    return text.encode("utf-8", "surrogateescape")


def members(given: Iterable[list[Any]]) -> list[ProcessName]:
    """Return members, whom JSON has as lists."""
    return [ProcessName(str(role), int(rank)) for role, rank in given]


class AgentLines:
    """Collects bytes and gives back whole lines, decoded.

    Args:
        magic: skip everything before these bytes.
    """

    def __init__(self, magic: bytes = b"") -> None:
        self._magic, self._pending = magic, b""
        self.noise = b""
        """The last bytes before the magic bytes."""

    def feed(self, more: bytes) -> list[list[Any]]:
        """Take in bytes and return the lines they complete.

        Raises:
            ValueError: a line is not a JSON list.
        """
        self._pending += more
        if self._magic:
            before, found, after = self._pending.partition(self._magic)
            self.noise = before[-4096:]
            if not found:
                return []
            self._magic, self._pending = b"", after
        *lines, self._pending = self._pending.split(b"\n")
        return [_line(line) for line in lines]


def _line(line: bytes) -> list[Any]:
    found = json.loads(line)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{line[:80]!r} is not a line of the agent's protocol")
    return found
