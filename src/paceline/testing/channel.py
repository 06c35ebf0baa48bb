"""Values that a worker function and the test that started it send to each other: one JSON value per line."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from paceline.testing.readable import readable

#: Variables with the file descriptors of the worker.
READ_VARIABLE, WRITE_VARIABLE = "PACELINE_TESTING_READ_FD", "PACELINE_TESTING_WRITE_FD"


class JsonLines:
    """Reads JSON values from a pipe, each with a deadline.

    Args:
        fd: the read end.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = b""

    def next(self, timeout_s: float) -> Any:
        """Return the next value.

        Raises:
            TimeoutError: nothing came in time.
            EOFError: the other side has ended.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._text:
            if not readable([self._fd], deadline - time.monotonic()):
                raise TimeoutError(f"nothing came within {timeout_s:g} s")
            data = os.read(self._fd, 65536)
            if not data:
                raise EOFError("the other side has ended")
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)


def say(fd: int, value: Any) -> None:
    """Write one JSON value to a pipe."""
    os.write(fd, json.dumps(value).encode() + b"\n")


_heard: JsonLines | None = None


def tell(value: Any) -> None:
    """Send a value to the test, inside a worker function."""
    say(int(os.environ[WRITE_VARIABLE]), value)


def listen(timeout_s: float = 60.0) -> Any:
    """Return the next value of the test, inside a worker function.

    Raises:
        TimeoutError: the test sent nothing in time.
        EOFError: the test has ended.
    """
    global _heard
    _heard = _heard or JsonLines(int(os.environ[READ_VARIABLE]))
    return _heard.next(timeout_s)
