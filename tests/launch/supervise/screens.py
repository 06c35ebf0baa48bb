"""A terminal for tests: a pseudo-terminal, and the screen that its bytes make."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time
from collections.abc import Callable

import pyte
import pytest

from paceline.testing.channel import readable

DEADLINE_S = 60.0


class Terminal:
    """``fd`` is the side of the program.

    Args:
        columns: width.
        lines: height.
    """

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.master, self.fd = os.openpty()
        os.set_blocking(self.master, False)
        self.screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._stream = pyte.ByteStream(self.screen)
        self.seen = b""
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def feed(self, data: bytes) -> None:
        """Take bytes as they come from the kernel."""
        self.seen += data
        self._stream.feed(data)

    def read(self, wait_s: float = 0.0) -> None:
        """Take the bytes that the program has written."""
        if readable([self.master], wait_s):
            try:
                self.feed(os.read(self.master, 65536))
            except OSError:  # nobody has the other side open
                time.sleep(wait_s)

    def drain(self) -> None:
        """Take all bytes of a program that has ended: one read gets a page of them at most."""
        while readable([self.master], 0.1):
            before = len(self.seen)
            self.read()
            if len(self.seen) == before:
                return

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > until:
                pytest.fail(f"{what}: {self.rows}")
            self.read(0.05)

    def shows(self, text: str) -> bool:
        return text in "\n".join(self.rows)

    @property
    def rows(self) -> list[str]:
        """Everything on the screen, and what has been scrolled out at its top."""
        above = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
        rows = [row.rstrip() for row in (*above, *self.screen.display)]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def cursor(self) -> tuple[int, int]:
        return self.screen.cursor.y, self.screen.cursor.x

    def close(self) -> None:
        os.close(self.master)
        os.close(self.fd)
