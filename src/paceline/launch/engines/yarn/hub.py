"""The hub: containers connect to it, and remote shells ask it for them. ``python -m paceline.launch.engines.yarn.hub``.

A process of its own, because it has threads and the launcher forks. It ends with its stdin; containers notice.

| it reads | it writes |
|---|---|
| one line of JSON on stdin: ``socket``, ``port``, ``key`` and ``names`` of the containers | ``PORT`` on stdout |
| connections of containers to the port | ``all`` on stdout when all have come |
| connections to the unix socket, see :mod:`~paceline.launch.remote.shell`: a name | the agent's output |
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Collection

from paceline.errors import PacelineError
from paceline.launch.engines.yarn.container import WAY, AgentChannel
from paceline.launch.remote.shell import EXIT, OUT, READ_BYTES, accept_all, failure, pack, read_request
from paceline.net.admission import Gate
from paceline.net.handshake import Agreed, Responder, Seen
from paceline.net.security import Security

#: How long a shell waits for its container, which connects again after each run of a job.
_REJOIN_S = 60.0
_START = b"agent"


class ContainerHub:
    """The containers that have come, and have proved that they hold the key."""

    def __init__(self, key: str, names: Collection[str]) -> None:
        self._psk, self._names = Security(key).psk, frozenset(names)
        self._came: set[str] = set()
        self._waiting: dict[str, AgentChannel] = {}
        self._changed = threading.Condition()

    def listen(self, listener: socket.socket) -> Gate:
        """Let containers in that hold the key, on a thread."""
        seen = Seen()
        return Gate([listener], lambda is_unix: Responder(self._psk, True, WAY, seen), self._admit)

    def _admit(self, sock: socket.socket, agreed: Agreed) -> None:
        """Let a container wait, if it is one of this job."""
        channel, name = AgentChannel(sock, agreed), agreed.identity.decode(errors="replace")
        if name not in self._names:
            channel.close()
            return
        with self._changed:
            old = self._waiting.pop(name, None)
            self._waiting[name] = channel
            complete = self._came != self._names and self._came | {name} == self._names
            self._came.add(name)
            self._changed.notify_all()
        if old is not None:
            old.close()
        if complete:
            print("all", flush=True)

    def serve(self, connection: socket.socket) -> None:
        """Join a remote shell and the container that it asks for, when that is there."""
        with connection:
            try:
                name = str(read_request(connection))
            except OSError:
                return
            with self._changed:
                came = self._changed.wait_for(lambda: name in self._waiting, _REJOIN_S)
                channel = self._waiting.pop(name) if came else None
            with contextlib.suppress(OSError):  # the remote shell has left
                if channel is None:
                    connection.sendall(failure(f"the container {name} has not connected within {_REJOIN_S:g} s"))
                else:
                    _join(connection, channel)
                    connection.sendall(pack(EXIT, b"0"))


def _join(connection: socket.socket, channel: AgentChannel) -> None:
    """Pass data between a remote shell and a container, until one of them is gone."""
    try:
        channel.send(_START)
        threading.Thread(target=_pass_input, args=[connection, channel], daemon=True).start()
        while data := channel.receive():
            connection.sendall(pack(OUT, data))
    except (OSError, PacelineError):  # one of both is gone; the other one learns it
        pass
    finally:
        channel.close()


def _pass_input(connection: socket.socket, channel: AgentChannel) -> None:
    try:
        while data := connection.recv(READ_BYTES):
            channel.send(data)
        channel.send(b"")
    except OSError:  # one of both is gone; the other thread notices
        pass


def main() -> int:
    """Run until stdin ends."""
    asked = json.loads(sys.stdin.readline())
    hub = ContainerHub(asked["key"], asked["names"])
    with socket.socket(socket.AF_UNIX) as door:
        try:
            listener = socket.create_server(("", asked["port"]), backlog=1024)
        except OSError as error:
            print(f"port {asked['port']} cannot be used here: {error.strerror}: -o port=N chooses another", flush=True)
            return 1
        door.bind(asked["socket"])
        door.listen(1024)
        hub.listen(listener)
        accept_all(door, hub.serve)
        print(listener.getsockname()[1], flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads wait for connections
