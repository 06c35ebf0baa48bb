"""Values that a worker function and the test that started it send to each other: one JSON value per line."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

#: Variables with the file descriptors of the worker.
READ_VARIABLE, WRITE_VARIABLE = "PACELINE_TESTING_READ_FD", "PACELINE_TESTING_WRITE_FD"


def readable(fds: list[int], timeout_s: float | None = None) -> set[int]:
    """Return which file descriptors can be read (or are at their end). Waits until one can, or for the time given.

    Their numbers may be above 1023, which ``select`` does not take.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3)}


class JsonLines:
    """Reads JSON values from a pipe, each with a deadline."""

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
