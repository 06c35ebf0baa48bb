"""A connection that has not proved to be a member's holds next to nothing, and not for long."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.net import Security, admission, handshake, new_job_key
from paceline.net.handshake import GREETING_BYTES, Initiator, Way
from paceline.net.sockets import SocketHub, SocketListener
from paceline.wire import protocol

SECURITY = Security(new_job_key())
OPENING = b"PCL" + protocol()


@pytest.fixture
def listener() -> Iterator[SocketListener]:
    one = SocketListener(["tcp://127.0.0.1:*"], SECURITY, "server 0")
    yield one
    one.close()


def stranger(listener: SocketListener, first: bytes = b"") -> socket.socket:
    host, _, port = listener.addresses[0].removeprefix("tcp://").rpartition(":")
    sock = socket.create_connection((host, int(port)), 5)
    sock.sendall(first)
    return sock


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(0.01)
    try:
        while sock.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def join(listener: SocketListener, timeout_s: float = 10.0) -> float:
    """Return how long a member takes to be connected and heard."""
    start = time.monotonic()
    hub = SocketHub(SECURITY)
    try:
        channel = hub.connect(listener.addresses[0], b"member", "server 0")
        hub.send(channel, [b"hello"])
        while not listener.receive(0.1):
            assert time.monotonic() < start + timeout_s
    finally:
        hub.close()
    return time.monotonic() - start


@pytest.mark.parametrize("first", [b"", OPENING + b"K", OPENING + b"K" + bytes(40)])
def test_so_many_half_open_connections_there_are_and_no_more(
    monkeypatch: pytest.MonkeyPatch, listener: SocketListener, first: bytes
) -> None:
    monkeypatch.setattr(admission, "MAX_HALF_OPEN", 20)
    before = descriptors()
    those = [stranger(listener, first) for _ in range(100)]
    wait_until(lambda: sum(map(is_closed, those)) >= 80)
    assert not any(map(is_closed, those[-20:]))
    assert descriptors() - before <= 120
    join(listener)
    for one in those:
        one.close()


def test_strangers_take_a_quarter_of_the_descriptors_at_most(listener: SocketListener) -> None:
    """Otherwise a process with few of them can open nothing else, and its job fails."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    those = [stranger(listener, b"") for _ in range(100)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, before[1]))
    try:
        those += [stranger(listener, b"") for _ in range(20)]
        wait_until(lambda: sum(map(is_closed, those)) >= 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    join(listener)
    for one in those:
        one.close()


def test_a_handshake_that_is_not_done_in_time_is_over(
    monkeypatch: pytest.MonkeyPatch, listener: SocketListener, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admission, "HANDSHAKE_S", 0.3)
    slow = stranger(listener, b"P")
    start = time.monotonic()
    while not is_closed(slow):
        assert time.monotonic() < start + 10
        try:
            slow.sendall(b"C")  # a byte now and then does not help
        except OSError:
            break
        time.sleep(0.05)
    slow.close()
    assert "within 0.3 s" in caplog.text


def test_whatever_a_stranger_sends_stays_in_the_kernel(listener: SocketListener) -> None:
    """Not more is read than a handshake has: the rest meets a closed connection."""
    before = resident_bytes()
    attackers = [stranger(listener, OPENING + b"K" + bytes(30)) for _ in range(50)]
    for one in attackers:
        one.settimeout(0.01)
        try:
            for _ in range(64):
                one.sendall(bytes(1 << 20))
        except OSError:
            pass
        one.close()
    assert resident_bytes() - before < 16 * 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_replayed_hello_is_never_a_member_and_stops_none(listener: SocketListener) -> None:
    hello = Initiator(SECURITY.psk, b"member", True, Way(False, "server 0")).hello()
    first = stranger(listener, hello)
    assert first.recv(1)  # a WELCOME: nobody has sent it before
    those = [stranger(listener, hello + bytes(rest)) for rest in (0, 80) for _ in range(30)]
    wait_until(lambda: all(map(is_closed, those)))
    assert not is_closed(first)
    join(listener)
    assert listener.receive(0.1) == []
    for sock in (*those, first):
        sock.close()


def test_hellos_that_are_too_old_to_be_recognised_are_never_members_and_replace_each_other(
    monkeypatch: pytest.MonkeyPatch, listener: SocketListener
) -> None:
    monkeypatch.setattr(handshake, "MAX_SEEN", 0)
    monkeypatch.setattr(admission, "MAX_HALF_OPEN", 20)
    hello = Initiator(SECURITY.psk, b"member", True, Way(False, "server 0")).hello()
    those = [stranger(listener, hello) for _ in range(60)]
    wait_until(lambda: sum(map(is_closed, those)) >= 40)
    join(listener)
    one = stranger(listener, hello + bytes(80))
    wait_until(lambda: is_closed(one))
    assert listener.receive(0.1) == []
    for sock in (*those, one):
        sock.close()


def test_a_stranger_learns_only_that_it_is_refused(listener: SocketListener) -> None:
    sock = stranger(listener, Initiator(bytes(32), b"w", True, Way(False, "server 0")).hello())
    got = b""
    while chunk := sock.recv(1000):
        got += chunk
    assert got == (OPENING + b"W").ljust(GREETING_BYTES, b"\0")
    sock.close()


def test_gate_goes_on_when_the_process_has_no_descriptor_left(
    monkeypatch: pytest.MonkeyPatch, listener: SocketListener
) -> None:
    held = stranger(listener)
    real = socket.socket.accept
    failures = iter([OSError(24, "Too many open files")] * 3)

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        for error in failures:
            raise error
        return real(self)

    gate = listener._gate
    assert gate is not None
    wait_until(lambda: len(gate._strangers) == 1)
    monkeypatch.setattr(socket.socket, "accept", accept)
    join(listener)
    wait_until(lambda: is_closed(held))
    held.close()


@pytest.mark.parametrize("encrypt", [True, False])
def test_an_impostor_gets_neither_the_key_nor_a_gradient(encrypt: bool) -> None:
    """A listener without the key, which says what an honest one would: it gets the same HELLO again and again."""
    security = Security(new_job_key(), encrypt)
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub = SocketHub(security)
        channel = hub.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", b"worker", "server 0", bulk=True)
        hub.send(channel, [b"push", b"gradient" * 10_000])
        heard = []
        while not hub.refused(channel):
            sock, _ = server.accept()
            sock.settimeout(5)
            heard.append(sock.recv(1 << 20))
            sock.sendall(OPENING + b"K" + os.urandom(GREETING_BYTES - len(OPENING) - 1))
            while more := sock.recv(1 << 20):
                heard[-1] += more
            sock.close()
        hub.close()
    assert "does not hold this job's key" in str(hub.refused(channel))
    assert {len(one) for one in heard} == {GREETING_BYTES}
    assert not any(b"gradient" in one or security.job_key.encode() in one or security.psk in one for one in heard)


def test_without_descriptors_the_gate_rests_and_takes_members_again_when_there_are_some(
    listener: SocketListener, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    host, _, port = listener.addresses[0].removeprefix("tcp://").rpartition(":")
    with socket.socket() as sock:
        free = os.dup(sock.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            sock.connect((host, int(port)))
            wait_until(lambda: "Too many open files" in caplog.text)
            before = time.process_time()
            time.sleep(0.5)
            assert time.process_time() - before < 0.2
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        join(listener)


def test_a_listener_that_does_not_know_its_name_yet_has_those_who_connect_wait() -> None:
    listener, hub = SocketListener(["tcp://127.0.0.1:*"], SECURITY, None), SocketHub(SECURITY)
    channels = [hub.connect(listener.addresses[0], b"worker-1", name) for name in ("server 3", "server 4")]
    hub.send(channels[0], [b"hello"])
    wait_until(lambda: all(one.socket is not None for one in hub._channels))
    assert not any(map(hub.is_open, channels))
    listener.serve_as("server 3")
    while not (arrived := listener.receive(1.0)):
        pass
    assert [(peer, [bytes(frame) for frame in frames]) for peer, frames in arrived] == [(b"worker-1", [b"hello"])]
    wait_until(lambda: bool(hub.refused(channels[1])))
    hub.close()
    listener.close()


def test_a_listener_that_never_knew_its_name_closes() -> None:
    listener = SocketListener(["tcp://127.0.0.1:*"], SECURITY, None)
    stranger(listener).close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        stranger(listener)
