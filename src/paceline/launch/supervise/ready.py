"""The pipe on which the scheduler says where it listens.

The scheduler binds a port that is free at that moment and says which: nobody has to guess one beforehand, so there is
no moment in which another program can take it.
"""

from __future__ import annotations

import os
import re

_ADDRESS = re.compile(r"tcp://\S+:[1-9]\d{0,4}")


class ReadyPipe:
    """The launcher's end of the pipe; the scheduler inherits :attr:`write_fd` and writes one line."""

    def __init__(self) -> None:
        self.fd, self.write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._text = b""

    def read(self) -> str | None:
        """Return the address once its line is complete, "" at the end of a pipe without one, None before.

        Raises:
            ValueError: the line is not an address.
        """
        try:
            data = os.read(self.fd, 4096)
        except BlockingIOError:
            return None
        self._text += data
        if b"\n" not in self._text:
            return None if data else ""
        line = self._text.split(b"\n")[0].decode(errors="replace").strip()
        if not _ADDRESS.fullmatch(line):
            raise ValueError(f"said it listens at {line!r}, which is not tcp://host:port")
        return line

    def close(self) -> None:
        """Close the launcher's end."""
        os.close(self.fd)

    def close_write(self) -> None:
        """Close the scheduler's end in this process, after the scheduler has it."""
        os.close(self.write_fd)
