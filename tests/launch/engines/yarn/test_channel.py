"""Who may be a container of a job, and what travels."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.errors import ProtocolError
from paceline.launch.engines.yarn.container import AgentChannel, accept, connect
from paceline.launch.engines.yarn.hub import ContainerHub
from paceline.net.handshake import HandshakeError
from paceline.net.security import new_job_key

KEY = new_job_key()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def pair(listener: socket.socket) -> tuple[AgentChannel, AgentChannel]:
    made: list[AgentChannel] = []
    thread = threading.Thread(target=lambda: made.append(accept(listener.accept()[0], KEY)))
    thread.start()
    client = connect("127.0.0.1", listener.getsockname()[1], KEY, "worker-0")
    thread.join()
    return client, made[0]


def test_frames_arrive_in_order_whatever_their_size(listener: socket.socket) -> None:
    client, server = pair(listener)
    assert server.name == "worker-0"
    large = bytes(range(256)) * 9000
    sender = threading.Thread(target=lambda: [client.send(one) for one in (b"a", large, b"")])
    sender.start()
    assert server.receive() == b"a"
    assert b"".join(server.receive() or b"" for _ in range(3)) == large
    assert server.receive() == b""
    sender.join()
    client.close()
    assert server.receive() is None
    server.close()


def test_changed_frame_ends_the_connection(listener: socket.socket) -> None:
    client, server = pair(listener)
    server._sock.sendall((5).to_bytes(4, "big") + bytes(21))
    with pytest.raises(ProtocolError, match="changed"):
        client.receive()
    server._sock.sendall((1 << 30).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match="a frame of"):
        client.receive()


@pytest.mark.parametrize(("key", "name"), [(new_job_key(), "worker-0"), (KEY, "worker-7")], ids=["key", "name"])
def test_hub_lets_no_stranger_wait(listener: socket.socket, key: str, name: str) -> None:
    hub = ContainerHub(KEY, ["worker-0"])
    thread = threading.Thread(target=lambda: hub.admit(listener.accept()[0]))
    thread.start()
    if key == KEY:
        assert connect("127.0.0.1", listener.getsockname()[1], key, name).receive() is None
    else:
        with pytest.raises(HandshakeError):
            connect("127.0.0.1", listener.getsockname()[1], key, name)
    thread.join()
    assert hub._waiting == {}
