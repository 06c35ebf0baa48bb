"""Connections that come and go leave nothing behind, and no error ends more than its connection."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from paceline.net import Security, connection, handshake, new_job_key, received, sockets
from paceline.net.endpoints import end, listen
from paceline.net.records import RecordReceiver, RecordSender
from paceline.net.sockets import SocketHub, SocketListener
from tests.soak.census import census, grown

SECURITY = Security(new_job_key())
WAIT_S = 20.0
#: A frame that does not travel with the head of its message, and that a thread of its own sends.
LARGE = 2 * connection.AT_ONCE_BYTES


@pytest.fixture(autouse=True)
def _connect_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "FIRST_RETRY_S", 0.0)


@pytest.fixture(autouse=True)
def _few_hellos_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MAX_SEEN", 4)


@pytest.fixture(autouse=True)
def _trace_no_thread() -> Iterator[None]:
    """Coverage keeps a tracer for every thread that there ever was."""
    trace = threading.gettrace()
    threading.settrace(None)  # type: ignore[arg-type]
    yield
    threading.settrace(trace)  # type: ignore[arg-type]


@pytest.fixture(params=["tcp://127.0.0.1:*", f"ipc://@paceline-test-connections-{os.getpid()}"], ids=["tcp", "unix"])
def listener(request: pytest.FixtureRequest) -> Iterator[SocketListener]:
    one = SocketListener([request.param], SECURITY, "server 0")
    yield one
    one.close()


@pytest.fixture
def hub(listener: SocketListener) -> Iterator[SocketHub]:
    one = SocketHub(SECURITY)
    one.connect(listener.addresses[0], b"worker-1", "server 0")
    yield one
    one.close()


def until(condition: Callable[[], object], hub: SocketHub | None = None) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        if hub is None:
            time.sleep(0.001)
        else:
            hub.receive(0.05)


def exchange(hub: SocketHub, listener: SocketListener, frames: list[object]) -> None:
    """Send frames to the listener and back."""
    hub.send(0, frames)
    arrived: list[tuple[bytes, object]] = []
    until(lambda: arrived.extend(listener.receive(0.05)) or arrived)
    listener.send(arrived[0][0], frames)
    back: list[object] = []
    until(lambda: back.extend(hub.receive(0.05)) or back)


def cut(hub: SocketHub) -> None:
    """Cut the connection, and wait for the next one."""
    end(hub._channels[0].socket)
    until(hub.reopened, hub)


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_messages_are_under_way_until_the_kernel_of_the_peer_has_them(hub: SocketHub, listener: SocketListener) -> None:
    hub.send(0, [b"hello"])
    arrived: list[tuple[bytes, object]] = []
    until(lambda: arrived.extend(listener.receive(0.05)) or arrived)
    peer = arrived[0][0]
    until(lambda: not listener.is_sending(peer))
    large, count = memoryview(bytes(16 * LARGE)), 4 + received.RECEIVE_AHEAD
    for _ in range(count):  # more than the hub reads ahead
        listener.send(peer, [b"answer", large])
    assert listener.is_sending(peer), "the hub takes no message, so some still wait"
    back: list[object] = []
    until(lambda: back.extend(hub.receive(0.05)) or len(back) == count)
    until(lambda: not listener.is_sending(peer))
    assert not listener.is_sending(b"a stranger")


def test_1000_connections_of_one_member_leave_nothing(hub: SocketHub, listener: SocketListener) -> None:
    frames: list[object] = [b"hello", memoryview(bytes(LARGE))]
    for _ in range(20):
        exchange(hub, listener, frames)
        cut(hub)
    exchange(hub, listener, frames)
    before, tables = held(), census()
    for _ in range(1000):
        cut(hub)
    exchange(hub, listener, frames)
    until(lambda: held() <= before)
    assert grown(tables, census(), 50) == {}


def test_1000_members_that_come_and_go_leave_nothing(listener: SocketListener) -> None:
    def come_and_go(number: int) -> None:
        hub = SocketHub(SECURITY)
        hub.connect(listener.addresses[0], b"worker-%d" % number, "server 0")
        hub.send(0, [b"hello"])
        until(lambda: listener.receive(0.05))
        hub.close()

    for number in range(20):
        come_and_go(number)
    before, tables = held(), census()
    for number in range(1000):
        come_and_go(20 + number)
    until(lambda: held() <= before)
    assert grown(tables, census(), 50) == {}


def test_a_frame_is_free_when_it_was_sent_and_when_it_was_used(hub: SocketHub, listener: SocketListener) -> None:
    array = np.zeros(LARGE, np.uint8)
    sent = weakref.ref(array)
    hub.send(0, [b"hello", array.data])
    del array
    arrived: list[tuple[bytes, list[object]]] = []
    until(lambda: arrived.extend(listener.receive(0.05)) or arrived)
    until(lambda: sent() is None)
    used = weakref.ref(arrived[0][1][1].obj)
    assert used() is not None
    arrived.clear()
    gc.collect()
    assert used() is None


def test_a_reader_that_fails_ends_its_connection_only(
    hub: SocketHub, listener: SocketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange(hub, listener, [b"before"])
    message = RecordReceiver.message
    failures = iter([MemoryError("no memory for a frame")])

    def fail_once(self: RecordReceiver) -> list[object]:
        found = message(self)
        for error in failures:
            raise error
        return found

    monkeypatch.setattr(RecordReceiver, "message", fail_once)
    exchange(hub, listener, [b"the readers wait in the method as it was"])
    hub.send(0, [b"lost"])
    until(hub.reopened, hub)
    exchange(hub, listener, [b"after"])


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_sender_that_fails_ends_its_connection_only(
    hub: SocketHub,
    listener: SocketListener,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    error: type[BaseException],
) -> None:
    if size == LARGE and error is KeyboardInterrupt:
        pytest.skip("only the main thread is interrupted, and it does not send what is large")
    exchange(hub, listener, [b"before"])
    until(lambda: not hub._channels[0]._busy)  # else its thread sends the next message, which nobody interrupts
    pieces = RecordSender.pieces
    failures = iter([error("in the middle")])

    def fail_once(self: RecordSender, frames: object, sizes: object) -> Iterator[object]:
        for one in failures:
            raise one
        yield from pieces(self, frames, sizes)

    monkeypatch.setattr(connection.RecordSender, "pieces", fail_once)
    try:
        hub.send(0, [memoryview(bytes(size))])
    except error:
        assert size != LARGE
    until(hub.reopened, hub)
    exchange(hub, listener, [b"after"])


def test_what_waits_when_a_connection_closes_is_left_to_its_asker(hub: SocketHub, listener: SocketListener) -> None:
    exchange(hub, listener, [b"before"])
    channel = hub._channels[0]
    until(lambda: not channel._busy)
    channel._busy = True  # as if a thread were still sending
    hub.send(0, [b"waits"])
    assert channel.socket is not None
    end(channel.socket)
    until(lambda: not hub.is_open(0))
    channel._busy = False
    hub.send(0, [b"sent without a connection"])
    until(hub.reopened)
    arrived: list[tuple[bytes, object]] = []
    until(lambda: arrived.extend(listener.receive(0.05)) or arrived)
    assert [frames for _, frames in arrived] == [[b"sent without a connection"]]


def test_thread_that_cannot_start_is_started_with_the_next_message(hub: SocketHub, listener: SocketListener) -> None:
    until(lambda: hub.is_open(0))
    before = threading.stack_size(1 << 47)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            hub.send(0, [b"body", memoryview(bytes(LARGE))])
    finally:
        threading.stack_size(before)
    hub.send(0, [b"next"])
    arrived: list[tuple[bytes, list[object]]] = []
    until(lambda: arrived.extend(listener.receive(0.05)) or len(arrived) == 2)
    assert [bytes(frames[0]) for _, frames in arrived] == [b"body", b"next"]


def test_closing_waits_for_no_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = listen("tcp://127.0.0.1:*")
    hub = SocketHub(SECURITY)
    for _ in range(8):
        hub.connect(silent[1], b"worker-1", "server 0")
    until(lambda: all(one.socket is not None for one in hub._channels))
    began = time.monotonic()
    hub.close()
    assert time.monotonic() - began < 0.9
    assert not [one for one in threading.enumerate() if silent[1] in one.name]
    silent[0].close()


def test_a_hub_that_is_closed_connects_no_more(listener: SocketListener) -> None:
    """An interpreter may end, and close all hubs, while another thread is about to connect."""
    hub = SocketHub(SECURITY)
    hub.close()
    hub.connect(listener.addresses[0], b"worker-1", "server 0")
    assert not [one for one in threading.enumerate() if listener.addresses[0] in one.name]


def test_hub_says_that_nobody_listens_any_more_where_the_kernel_says_so(
    hub: SocketHub, listener: SocketListener
) -> None:
    until(lambda: hub.is_open(0))
    assert not hub.is_deserted(0)
    listener.close()
    until(lambda: hub.is_deserted(0))
    again = SocketListener([listener.addresses[0]], SECURITY, "server 0")
    until(lambda: hub.is_open(0))
    assert not hub.is_deserted(0)
    again.close()


def test_a_message_of_which_the_kernel_takes_a_part_arrives_whole(hub: SocketHub, listener: SocketListener) -> None:
    exchange(hub, listener, [b"before"])
    sock = hub._channels[0].socket
    assert sock is not None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    frames = [bytes([number]) * (connection.AT_ONCE_BYTES // 4) for number in range(3)]
    for _ in range(10):
        hub.send(0, [b"body", *frames])
    arrived: list[tuple[bytes, list[object]]] = []
    until(lambda: arrived.extend(listener.receive(0.05)) or len(arrived) == 10)
    assert all([bytes(frame) for frame in one] == [b"body", *frames] for _, one in arrived)


def test_a_message_of_moderate_size_is_sent_by_the_thread_that_brings_it(
    hub: SocketHub, listener: SocketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange(hub, listener, [b"before"])
    pieces, threads = RecordSender.pieces, set[str]()

    def noted(self: RecordSender, frames: object, sizes: object) -> Iterator[object]:
        threads.add(threading.current_thread().name)
        return pieces(self, frames, sizes)

    monkeypatch.setattr(connection.RecordSender, "pieces", noted)
    exchange(hub, listener, [b"body", bytes(connection.AT_ONCE_BYTES // 2)])
    assert threads == {threading.current_thread().name}


def test_the_thread_that_sends_is_not_woken_while_it_has_nothing_to_send(
    hub: SocketHub, listener: SocketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange(hub, listener, [bytes(LARGE)])
    has_work, looking = connection.Connection._has_work, list[str]()

    def noted(self: connection.Connection[object]) -> bool:
        looking.append(threading.current_thread().name)
        return has_work(self)

    monkeypatch.setattr(connection.Connection, "_has_work", noted)
    for _ in range(20):
        exchange(hub, listener, [b"small"])
    assert len([name for name in looking if name.startswith("paceline-send")]) <= 2, "one last look of each end's"


def test_a_connection_whose_messages_nobody_takes_is_made_again(
    hub: SocketHub, listener: SocketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange(hub, listener, [b"before"])
    monkeypatch.setattr(received, "UNREAD_S", 0.05)
    for _ in range(received.RECEIVE_AHEAD + 1):
        hub.send(0, [b"body", bytes(received.SMALL_MESSAGE_BYTES)])
    until(hub.reopened)
    until(lambda: listener.receive(0.0) == [])
    exchange(hub, listener, [b"after"])


def test_a_connection_does_not_wait_for_ever_for_the_last_message_of_the_one_before(
    hub: SocketHub, listener: SocketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange(hub, listener, [b"before"])
    monkeypatch.setattr(connection, "LAST_SEND_S", 0.01)
    channel = hub._channels[0]
    until(lambda: not channel._busy)
    channel._busy = True  # as if a thread were still sending
    assert channel.socket is not None
    end(channel.socket)
    until(lambda: not hub.is_open(0))
    time.sleep(0.1)
    assert not hub.is_open(0)
    channel._busy = False
    until(hub.reopened)
    exchange(hub, listener, [b"after"])
