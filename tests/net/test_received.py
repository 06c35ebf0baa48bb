"""Messages that have arrived are never forgotten and keep their order, whichever thread reads them."""

from __future__ import annotations

import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.net import Security, new_job_key, sockets
from paceline.net.aead import AesGcm, NoCipher, TamperedError
from paceline.net.received import BURST, BURST_BYTES, LEND_AFTER, Loan, ReceivedQueue, SocketPoll
from paceline.net.records import SMALL_BYTES, ClosedError, Intake, RecordReceiver, RecordSender
from paceline.net.sockets import SocketHub, SocketListener

LONG_S = 30.0
linux = pytest.mark.skipif(not SocketPoll.IS_POSSIBLE, reason="connections are lent on Linux alone")


def put(inbox: ReceivedQueue[int], source: int, size: int) -> None:
    inbox.put(source, [b""], size, queue.SimpleQueue())


def take_all(inbox: ReceivedQueue[int], timeout_s: float = 0.0) -> list[int]:
    return [source for source, _ in inbox.receive(timeout_s)]


def test_a_watcher_is_woken_again_for_large_messages_that_were_left() -> None:
    own, watched = ReceivedQueue[int](), ReceivedQueue[int]()
    watched.add_watcher(own)
    for source in range(3):
        put(watched, source, BURST_BYTES // 2 + 1)
    assert take_all(own, LONG_S) == []
    assert take_all(watched) == [0, 1]
    began = time.monotonic()
    assert take_all(own, LONG_S) == []
    assert time.monotonic() - began < LONG_S / 2
    assert take_all(watched) == [2]


def test_a_watcher_is_woken_again_for_many_messages_that_were_left() -> None:
    own, watched = ReceivedQueue[int](), ReceivedQueue[int]()
    watched.add_watcher(own)
    for source in range(BURST + 1):
        put(watched, source, 1)
    take_all(own, LONG_S)
    assert len(take_all(watched)) == BURST
    began = time.monotonic()
    take_all(own, LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    assert take_all(watched) == [BURST]


def test_a_watcher_sleeps_when_nothing_is_left() -> None:
    own, watched = ReceivedQueue[int](), ReceivedQueue[int]()
    watched.add_watcher(own)
    put(watched, 1, 1)
    take_all(own, LONG_S)
    assert take_all(watched) == [1]
    began = time.monotonic()
    assert take_all(own, 0.2) == []
    assert time.monotonic() - began >= 0.2


# ---- connections that are lent ------------------------------------------------------------------------------------


class Lent:
    """A connection that its own thread lends, and the other end of it."""

    def __init__(self, inbox: ReceivedQueue[int], source: int, key: bytes | None = None) -> None:
        ours, self.peer = socket.socketpair()
        self.ours, self.raised = ours, list[BaseException]()
        ciphers = [NoCipher() if key is None else AesGcm(key) for _ in range(2)]
        self.sender = RecordSender(ciphers[0], True)
        self.reader = RecordReceiver(ciphers[1], True, Intake(ours))
        self.loan = Loan(source, ours, self.reader)
        self.thread = threading.Thread(target=self._lend, args=(inbox,))
        self.thread.start()

    def _lend(self, inbox: ReceivedQueue[int]) -> None:
        try:
            inbox.lend(self.loan)
        except BaseException as error:  # noqa: BLE001 - thread border: the tests look at it
            self.raised.append(error)

    def bytes_of(self, *frames: bytes) -> bytes:
        return b"".join(map(bytes, self.sender.pieces(frames, list(map(len, frames)))))

    def close(self) -> None:
        self.loan.give_back()
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()
        self.ours.close()
        self.peer.close()


@pytest.fixture
def inbox() -> Iterator[ReceivedQueue[int]]:
    one = ReceivedQueue[int]()
    yield one
    one.end()


def taken(inbox: ReceivedQueue[int], timeout_s: float = LONG_S) -> list[tuple[int, list[bytes]]]:
    return [(source, [bytes(frame) for frame in frames]) for source, frames in inbox.receive(timeout_s)]


def gathered(inbox: ReceivedQueue[int], count: int) -> list[tuple[int, list[bytes]]]:
    """Return so many messages."""
    found: list[tuple[int, list[bytes]]] = []
    deadline = time.monotonic() + LONG_S
    while len(found) < count:
        assert time.monotonic() < deadline
        found += taken(inbox)
    return found


def until(condition: Callable[[], object], inbox: ReceivedQueue[int] | None = None) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        if inbox is None:
            time.sleep(0.001)
        else:
            inbox.receive(0.01)


@linux
def test_a_message_that_is_there_in_part_stops_no_other(inbox: ReceivedQueue[int]) -> None:
    slow, quick = Lent(inbox, 1), Lent(inbox, 2)
    until(lambda: len(inbox._loans) == 2, inbox)
    whole = slow.bytes_of(b"body", b"late")
    for at in range(len(whole) - 1):
        slow.peer.sendall(whole[at : at + 1])
        quick.peer.sendall(quick.bytes_of(b"quick"))
        assert gathered(inbox, 1) == [(2, [b"quick"])]
    slow.peer.sendall(whole[-1:])
    assert gathered(inbox, 1) == [(1, [b"body", b"late"])]
    slow.close()
    quick.close()
    assert not inbox._loans


@linux
def test_many_messages_that_came_at_once_are_all_taken(inbox: ReceivedQueue[int]) -> None:
    one, count = Lent(inbox, 1), 3 * BURST
    until(lambda: inbox._loans, inbox)
    sending = threading.Thread(
        target=one.peer.sendall, args=(b"".join(one.bytes_of(b"%d" % each) for each in range(count)),)
    )
    sending.start()
    assert gathered(inbox, count) == [(1, [b"%d" % each]) for each in range(count)]
    sending.join()
    one.close()


@linux
@pytest.mark.parametrize("size", [SMALL_BYTES, 100 * SMALL_BYTES])
def test_a_large_frame_is_left_to_the_thread_of_its_connection(inbox: ReceivedQueue[int], size: int) -> None:
    one = Lent(inbox, 1)
    until(lambda: inbox._loans, inbox)
    sending = threading.Thread(target=one.peer.sendall, args=(one.bytes_of(b"body", bytes(size), b"end"),))
    sending.start()
    until(lambda: not one.thread.is_alive(), inbox)
    assert one.raised == []
    assert [bytes(frame) for frame in one.reader.message()] == [b"body", bytes(size), b"end"]
    sending.join()
    one.close()


@linux
def test_messages_before_an_error_are_taken(inbox: ReceivedQueue[int]) -> None:
    one = Lent(inbox, 1, bytes(range(32)))
    until(lambda: inbox._loans, inbox)
    before = [one.bytes_of(b"%d" % number) for number in range(3)]
    changed = bytearray(one.bytes_of(b"changed"))
    changed[-1] ^= 1
    one.peer.sendall(b"".join(before) + changed)
    assert gathered(inbox, 3) == [(1, [b"%d" % number]) for number in range(3)]
    until(lambda: not one.thread.is_alive(), inbox)
    assert [type(error) for error in one.raised] == [TamperedError]
    one.close()


@linux
def test_a_head_that_does_not_fit_the_buffer_is_left_to_the_thread_of_its_connection(inbox: ReceivedQueue[int]) -> None:
    one, frames = Lent(inbox, 1), [bytes(SMALL_BYTES - 1)] * 4 + [b""] * 60
    until(lambda: inbox._loans, inbox)
    sending = threading.Thread(target=one.peer.sendall, args=(one.bytes_of(*frames),))
    sending.start()
    until(lambda: not one.thread.is_alive(), inbox)
    assert [bytes(frame) for frame in one.reader.message()] == frames
    sending.join()
    one.close()


@linux
def test_an_error_is_raised_in_the_thread_of_the_connection(inbox: ReceivedQueue[int]) -> None:
    key = bytes(range(32))
    ended, tampered, good = (Lent(inbox, source, key) for source in range(3))
    until(lambda: len(inbox._loans) == 3, inbox)
    ended.peer.close()
    changed = bytearray(tampered.bytes_of(b"body"))
    changed[-1] ^= 1
    tampered.peer.sendall(changed)
    until(lambda: not ended.thread.is_alive() and not tampered.thread.is_alive(), inbox)
    assert [type(error) for error in ended.raised + tampered.raised] == [ClosedError, TamperedError]
    good.peer.sendall(good.bytes_of(b"good"))
    assert gathered(inbox, 1) == [(2, [b"good"])]
    for one in (ended, tampered, good):
        one.close()


@linux
def test_a_thread_that_waits_for_lent_connections_is_woken(inbox: ReceivedQueue[int]) -> None:
    one = Lent(inbox, 1)
    until(lambda: inbox._loans, inbox)
    for act in (inbox.wake, lambda: put(inbox, 2, 1)):
        began = time.monotonic()
        thread = threading.Timer(0.05, act)
        thread.start()
        until(lambda: inbox.receive(LONG_S) or True)
        thread.join()
        assert time.monotonic() - began < LONG_S / 2
    began = time.monotonic()
    assert inbox.receive(0.1) == []
    assert time.monotonic() - began >= 0.1
    one.close()


def test_a_queue_that_has_ended_still_takes_messages(inbox: ReceivedQueue[int]) -> None:
    inbox.end()
    put(inbox, 1, 1)
    assert take_all(inbox) == [1]
    began = time.monotonic()
    assert inbox.receive(0.1) == []
    assert time.monotonic() - began >= 0.1
    one = Lent(inbox, 1)
    one.thread.join(LONG_S)
    assert not one.thread.is_alive()
    one.close()


def test_a_queue_that_another_thread_watches_lends_nothing(inbox: ReceivedQueue[int]) -> None:
    inbox.add_watcher(ReceivedQueue[int]())
    one = Lent(inbox, 1)
    one.thread.join(LONG_S)
    assert not one.thread.is_alive()
    one.close()


# ---- whole connections --------------------------------------------------------------------------------------------


@pytest.fixture(params=["tcp://127.0.0.1:*", f"ipc://@paceline-test-received-{os.getpid()}"], ids=["tcp", "unix"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SocketHub, SocketListener]]:
    monkeypatch.setattr(sockets, "FIRST_RETRY_S", 0.0)
    security = Security(new_job_key())
    listener, hub = SocketListener([request.param], security, "server 0"), SocketHub(security)
    hub.connect(listener.addresses[0], b"worker-1", "server 0")
    yield hub, listener
    hub.close()
    listener.close()


def test_messages_of_all_sizes_keep_their_order(ends: tuple[SocketHub, SocketListener]) -> None:
    """Each number comes back, over a connection that is lent again and again."""
    hub, listener = ends
    chance = random.Random(1)
    sizes: list[int] = []
    while len(sizes) < 2000:
        sizes += [chance.choice([0, 1, 1000]) for _ in range(chance.choice([1, LEND_AFTER, 3 * LEND_AFTER]))]
        sizes += [chance.choice([SMALL_BYTES, 2**18, 2**20])] * chance.choice([0, 1, 6])
    lent = set[bool]()

    def echo() -> None:
        told = 0
        while told < len(sizes):
            for peer, frames in listener.receive(LONG_S):
                told += 1
                listener.send(peer, frames)

    thread = threading.Thread(target=echo)
    thread.start()
    back: list[tuple[int, int]] = []
    for number, size in enumerate(sizes):
        hub.send(0, [b"%d" % number, bytes(size)])
        while number - len(back) > 40 or (number == len(sizes) - 1 and len(back) < len(sizes)):
            back += [(int(bytes(frames[0])), len(frames[1])) for _, frames in hub.receive(LONG_S)]
            lent.add(bool(hub._loans))
    thread.join(LONG_S)
    assert back == list(enumerate(sizes))
    assert lent == {False, SocketPoll.IS_POSSIBLE}


def exchange(hub: SocketHub, listener: SocketListener, count: int) -> None:
    """Send requests and answers."""
    for _ in range(count):
        hub.send(0, [b"ask"])
        while not (found := listener.receive(LONG_S)):
            pass
        listener.send(found[0][0], [b"answer"])
        until(lambda: hub.receive(0.05))


def test_a_lent_connection_that_ends_is_made_again(ends: tuple[SocketHub, SocketListener]) -> None:
    hub, listener = ends
    exchange(hub, listener, 3 * LEND_AFTER)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        assert bool(hub._loans) == bool(listener._loans) == SocketPoll.IS_POSSIBLE
        sock = hub._channels[0].socket
        assert sock is not None
        sock.shutdown(socket.SHUT_RDWR)
        until(lambda: hub.receive(0.01) or hub.reopened())
        exchange(hub, listener, 2 * LEND_AFTER)
    until(lambda: listener.receive(0.01) or (len(os.listdir("/proc/self/fd")), threading.active_count()) == before)


@linux
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_read_makes_a_lent_connection_again(
    ends: tuple[SocketHub, SocketListener], monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    hub, listener = ends
    exchange(hub, listener, 3 * LEND_AFTER)
    assert hub._loans

    def interrupted(self: RecordReceiver) -> None:
        raise kind

    listener.send(next(iter(listener._loans.values())).source, [b"read in part"])
    with monkeypatch.context() as patch:
        patch.setattr(RecordReceiver, "_begin", interrupted)
        if issubclass(kind, Exception):
            until(lambda: not hub._loans, hub)
        else:
            with pytest.raises(kind):
                hub.receive(LONG_S)
    until(lambda: hub.receive(0.01) or hub.reopened())
    exchange(hub, listener, 2 * LEND_AFTER)
    assert hub._loans


@linux
def test_a_failed_send_gives_a_lent_connection_back(ends: tuple[SocketHub, SocketListener]) -> None:
    hub, listener = ends
    exchange(hub, listener, 3 * LEND_AFTER)
    sock = hub._channels[0].socket
    assert hub._loans
    assert sock is not None
    sock.shutdown(socket.SHUT_WR)
    hub.send(0, [b"lost"])
    # The thread that takes messages does nothing, as in a long computation.
    until(lambda: hub._channels[0].socket not in (None, sock))
    exchange(hub, listener, 2 * LEND_AFTER)
