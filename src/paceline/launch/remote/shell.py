"""A remote shell through a broker: ``python -m paceline.launch.remote.shell SOCKET REQUEST``.

It sends the request, a line of JSON, to the socket of a broker, then its own stdin. Frames come back: a byte that names
the kind, four bytes of length, the bytes. The shell writes output to stdout or stderr, and ends with an exit code that
it gets. If none comes, the broker is gone. The broker's side of such a connection, and the broker as a child of
the launcher, are here as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.launch.host_list import Host

OUT, ERR, EXIT = 1, 2, 3
LARGEST = 1 << 20
#: Exit code of a remote shell whose engine failed; ssh has the same.
LOST = 255

READ_BYTES = 65536
_HEAD = struct.Struct("!BI")

#: Most bytes of the path of a unix socket.
_LONGEST_PATH = 107

#: In the text of a plan, for the socket of the broker, which is made when the job starts.
SOCKET = "<socket of the job>"

#: Time between two tries to accept a connection.
_AGAIN_S = 0.05

#: How long a process may take to end all that it holds, after its stdin was closed.
LEAVE_S = 10.0


def main(words: Sequence[str]) -> int:
    """Serve until the command has ended; return its exit code."""
    path, request = words
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(request.encode() + b"\n")
            threading.Thread(target=_send_input, args=[connection], daemon=True).start()
            for kind, data in unpack(connection):
                if kind == EXIT:
                    return int(data)
                _write(1 if kind == OUT else 2, data)
        print("the broker is gone", file=sys.stderr)
    except OSError as error:
        print(f"the broker is gone: {error.strerror}", file=sys.stderr)
    return LOST


def _send_input(connection: socket.socket) -> None:
    try:
        while data := os.read(0, READ_BYTES):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:  # the broker is gone; the main thread reports it
        pass


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def pack(kind: int, data: bytes) -> bytes:
    """Return frames of any number of bytes."""
    parts = [data[start : start + LARGEST] for start in range(0, len(data), LARGEST)] or [b""]
    return b"".join(_HEAD.pack(kind, len(part)) + part for part in parts)


def failure(text: str) -> bytes:
    """Return the last frames of a shell that cannot be served."""
    return pack(ERR, f"{text}\n".encode()) + pack(EXIT, str(LOST).encode())


def unpack(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Give the frames of a connection until it ends; a last one that is cut off is lost.

    Raises:
        ValueError: a frame is longer than any that is sent.
    """
    with connection.makefile("rb") as stream:
        while len(head := stream.read(_HEAD.size)) == _HEAD.size:
            kind, length = _HEAD.unpack(head)
            if length > LARGEST:
                raise ValueError(f"a frame of {length} bytes")
            data = stream.read(length)
            if len(data) < length:
                return
            yield kind, data


def read_request(connection: socket.socket) -> Any:
    """Return a shell's request to a broker. The rest is the input of its command.

    Raises:
        OSError: the shell has left.
    """
    text = b""
    while not text.endswith(b"\n"):
        one = connection.recv(1)
        if not one:
            raise OSError("the remote shell left")
        text += one
    return json.loads(text)


def accept_all(listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
    """Give every connection to ``take``, each in a thread, which ends with it; returns at once."""

    def accept() -> None:
        while listener.fileno() >= 0:
            try:
                connection, _ = listener.accept()
            except OSError:  # no descriptor is free while others end; or this connection has ended already
                time.sleep(_AGAIN_S)
                continue
            threading.Thread(target=take, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process by closing its stdin; kill it if it takes longer than :data:`LEAVE_S`."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended by itself
        process.stdin.close()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- the broker, as the launcher has it ------------------------------------------------------------------------------


def shell_command(python: str, request: str) -> list[str]:
    """Return the command of a remote shell that sends a request to the broker of a job."""
    return [python, "-P", "-m", "paceline.launch.remote.shell", SOCKET, request]


class Broker:
    """A child process that runs a module, and a folder for its socket. It ends, with all it holds, with its stdin."""

    def __init__(self, name: str, module: str) -> None:
        self._name, self._module = name, module
        self._folder = Path(tempfile.mkdtemp(prefix=f"paceline-{name}-"))
        if len(os.fsencode(self._folder / "socket")) > _LONGEST_PATH:
            self._folder.rmdir()
            self._folder = Path(tempfile.mkdtemp(prefix=f"paceline-{name}-", dir="/tmp"))
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = b""
        self.socket = str(self._folder / "socket")

    def start(self, line: str, environ: Mapping[str, str] | None = None) -> None:
        """Start the process, with a line for its stdin: its task."""
        with open(self._folder / "errors", "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, **(environ or {})},
            )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and says() tells why
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def says(self, timeout_s: float) -> str:
        """Return the next line of its stdout; nothing if none comes in time.

        Raises:
            LaunchError: it has ended; with its stderr.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard and selector.select(max(0.0, until - time.monotonic())):
                more = os.read(self._process.stdout.fileno(), 4096)
                if not more:
                    text = (self._folder / "errors").read_text(errors="replace").strip()
                    raise LaunchError(text or f"the {self._name} has ended")
                self._heard += more
        line, newline, rest = self._heard.partition(b"\n")
        if not newline:
            return ""
        self._heard = rest
        return line.decode().strip()

    def located(self, command: Callable[[Host], Sequence[str]]) -> Callable[[Host], list[str]]:
        """Return commands of remote shells with the socket in the place of :data:`SOCKET`."""
        return lambda host: [self.socket if word == SOCKET else word for word in command(host)]

    def close(self) -> None:
        """End the process and remove its folder. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdout is not None
            process.stdout.close()
            end(process)
        shutil.rmtree(self._folder, ignore_errors=True)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # its thread may wait for input
