"""Who may be a container of a job, and what travels."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.errors import ProtocolError
from paceline.launch.engines.yarn.container import WAY, AgentChannel, connect
from paceline.launch.engines.yarn.hub import ContainerHub
from paceline.net.admission import Gate
from paceline.net.handshake import HandshakeError, Responder
from paceline.net.security import Security, new_job_key

KEY = new_job_key()


@pytest.fixture
def pair() -> Iterator[tuple[AgentChannel, AgentChannel]]:
    made: queue.SimpleQueue[AgentChannel] = queue.SimpleQueue()
    listener = socket.create_server(("127.0.0.1", 0))

    def respond(is_unix: bool) -> Responder:
        return Responder(Security(KEY).psk, True, WAY)

    gate = Gate([listener], respond, lambda sock, agreed: made.put(AgentChannel(sock, agreed)))
    with contextlib.closing(gate):
        client = connect("127.0.0.1", listener.getsockname()[1], KEY, "worker-0")
        server = made.get(timeout=60)
        yield client, server
        client.close()
        server.close()


def test_frames_arrive_in_order_whatever_their_size(pair: tuple[AgentChannel, AgentChannel]) -> None:
    client, server = pair
    large = bytes(range(256)) * 9000
    sender = threading.Thread(target=lambda: [client.send(one) for one in (b"a", large, b"")])
    sender.start()
    assert server.receive() == b"a"
    assert b"".join(server.receive() or b"" for _ in range(3)) == large
    assert server.receive() == b""
    sender.join()
    client.close()
    assert server.receive() is None


def test_changed_frame_ends_the_connection(pair: tuple[AgentChannel, AgentChannel]) -> None:
    client, server = pair
    server._sock.sendall((5).to_bytes(4, "big") + bytes(21))
    with pytest.raises(ProtocolError, match="changed"):
        client.receive()
    server._sock.sendall((1 << 30).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match="a frame of"):
        client.receive()


@pytest.mark.parametrize(("key", "name"), [(new_job_key(), "worker-0"), (KEY, "worker-7")], ids=["key", "name"])
def test_hub_lets_no_stranger_wait(key: str, name: str) -> None:
    hub, listener = ContainerHub(KEY, ["worker-0"]), socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with contextlib.closing(hub.listen(listener)):
        if key == KEY:
            assert connect("127.0.0.1", port, key, name).receive() is None
        else:
            with pytest.raises(HandshakeError):
                connect("127.0.0.1", port, key, name)
    assert hub._waiting == {}
