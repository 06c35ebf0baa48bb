"""A peer that has not said who it is gets little from a listener, and a member what it needs."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.errors import ProtocolError
from paceline.net import Security, connection, new_job_key
from paceline.net.answerer import Answerer
from paceline.net.claims import (
    UNCLAIMED_AHEAD,
    UNCLAIMED_BYTES,
    UNCLAIMED_S,
    UNCLAIMED_SPARE,
    UNCLAIMED_UNSENT_BYTES,
    Allowance,
    Bounds,
    Claims,
    host_of,
)
from paceline.net.received import RECEIVE_AHEAD
from paceline.net.records import ClosedError, Intake
from paceline.net.sockets import SocketHub, SocketListener
from paceline.wire import decode, encode, limits
from paceline.wire import messages as m
from tests.net.memory_network import MemoryHub, MemoryListener, MemoryNetwork

SECURITY = Security(new_job_key())
WAIT_S = 20.0
BOUNDS = Bounds(of_a_host=3, largest=2**20)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def listener() -> Iterator[SocketListener]:
    one = SocketListener(["tcp://127.0.0.1:*"], SECURITY, "server 0", watch=True, bounds=BOUNDS)
    yield one
    one.close()


@pytest.fixture
def hub() -> Iterator[SocketHub]:
    one = SocketHub(SECURITY)
    yield one
    one.close()


def connected(hub: SocketHub, listener: SocketListener, identity: bytes) -> int:
    """Connect, and wait until the listener has heard the peer."""
    channel = hub.connect(listener.addresses[0], identity, "server 0")
    hub.send(channel, [b"hello"])
    assert taken(listener, 1) == [(identity, [b"hello"])]
    return channel


def taken(listener: SocketListener, count: int) -> list[tuple[bytes, list[bytes]]]:
    found: list[tuple[bytes, list[bytes]]] = []
    until(
        lambda: (
            found.extend((peer, list(map(bytes, some))) for peer, some in listener.receive(0.05)) or len(found) == count
        )
    )
    return found


def lost(listener: SocketListener) -> list[bytes]:
    found: list[bytes] = []
    until(lambda: found.extend(listener.lost()) or found)
    return found


# ---- before a claim --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[UNCLAIMED_BYTES + 1], [64 * 1024], [100, 2**19], [1] * 2000])
def test_message_that_is_too_large_before_a_claim_ends_the_connection(
    listener: SocketListener, hub: SocketHub, sizes: list[int]
) -> None:
    channel, frames = connected(hub, listener, b"one"), [bytes(size) for size in sizes]
    hub.send(channel, frames)
    assert lost(listener) == [b"one"]
    assert listener.receive(0.0) == []
    listener.claimed(b"one")
    until(hub.reopened)
    hub.send(channel, frames)
    assert taken(listener, 1) == [(b"one", frames)]


def test_members_have_a_bound_too(listener: SocketListener, hub: SocketHub) -> None:
    listener.claimed(b"one")
    channel = connected(hub, listener, b"one")
    hub.send(channel, [bytes(BOUNDS.largest + 1)])
    assert lost(listener) == [b"one"]


def test_oldest_of_a_host_that_has_claimed_nothing_ends_for_the_newest(
    listener: SocketListener, hub: SocketHub
) -> None:
    names = [b"peer-%d" % number for number in range(BOUNDS.of_a_host)]
    for name in names:
        connected(hub, listener, name)
    listener.claimed(names[0])
    other = SocketHub(SECURITY)
    connected(other, listener, b"newest")  # there is room: one of the three is a member
    assert listener.lost() == []
    connected(other, listener, b"one too many")
    assert lost(listener) == names[1:2]
    other.close()


def test_messages_before_a_claim_wait_in_the_kernel(listener: SocketListener, hub: SocketHub) -> None:
    channel, peers = connected(hub, listener, b"one"), listener._peers
    for number in range(3 * UNCLAIMED_AHEAD):
        hub.send(channel, [b"%d" % number])
    until(lambda: listener._queue.qsize() == UNCLAIMED_AHEAD)
    room = peers[b"one"]._room
    assert room._small.empty()
    listener.claimed(b"one")
    assert [frames for _, frames in taken(listener, 3 * UNCLAIMED_AHEAD)] == [[b"%d" % n] for n in range(12)]
    until(lambda: room._small.qsize() == connection.Room()._small.qsize())
    listener.claimed(b"one")
    assert room._small.qsize() == connection.Room()._small.qsize()


def test_who_takes_no_answers_before_its_claim_is_sent_no_more(listener: SocketListener, hub: SocketHub) -> None:
    connected(hub, listener, b"one")
    large = bytes(16 * UNCLAIMED_UNSENT_BYTES)
    listener.send(b"one", [large])
    until(lambda: [bytes(frame) for _, (frame,) in hub.receive(0.05)] == [large])
    for _ in range(2 * RECEIVE_AHEAD):
        listener.send(b"one", [large])
    assert lost(listener) == [b"one"]
    assert listener.unsent_bytes(b"one") == 0


def test_member_is_a_member_until_it_is_said_that_it_is_none(listener: SocketListener, hub: SocketHub) -> None:
    listener.claimed(b"one")
    connected(hub, listener, b"one")
    listener.unclaimed(b"one")
    assert lost(listener) == [b"one"]
    listener.unclaimed(b"never there")


@pytest.mark.parametrize(("since_s", "error"), [(UNCLAIMED_S - 5, ClosedError), (UNCLAIMED_S + 1, ProtocolError)])
def test_silence_before_a_claim_has_a_deadline(since_s: float, error: type[Exception]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        intake = Intake(ours, Allowance.before_a_claim())
        intake.began -= since_s
        theirs.sendall(b"a little")  # slowly is silent, too
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(error):
            intake.exactly(100)


def test_all_members_of_a_job_can_come_from_one_address_before_any_is_answered(hub: SocketHub) -> None:
    count = 24
    with_room = SocketListener(["tcp://127.0.0.1:*"], SECURITY, "server 0", watch=True, bounds=Bounds.of_job(count))
    for number in range(UNCLAIMED_SPARE + 2 * count):
        channel = hub.connect(with_room.addresses[0], b"worker-%d" % number, "server 0")
        hub.send(channel, [b"hello"])
    assert len(taken(with_room, UNCLAIMED_SPARE + 2 * count)) == UNCLAIMED_SPARE + 2 * count
    assert with_room.lost() == []
    with_room.close()


def test_connections_are_counted_by_host() -> None:
    claims: Claims[str] = Claims(1)
    assert claims.add("a", "one") is None
    assert claims.add("b", "other") is None
    assert claims.add("c", "one") == "a"
    claims.remove("c", "one")
    claims.remove("c", "one")
    assert claims.add("d", "one") is None
    claims.claim(b"x")
    assert b"x" in claims
    claims.forget(b"x")
    assert b"x" not in claims


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_host_of_an_address(address: str, host: str) -> None:
    assert host_of(address) == host


# ---- after it --------------------------------------------------------------------------------------------------------


class Desk:
    """An answerer whose one peer sends what it likes."""

    def __init__(self, most_bytes: float) -> None:
        network = MemoryNetwork()
        self.listener, self.hub = MemoryListener(network, "memory://server"), MemoryHub(network)
        self.listener.peers[b"one"] = (self.hub, 0)
        self.answerer = Answerer(self.listener, lambda peer: True, most_bytes=most_bytes)  # type: ignore[arg-type]
        self.seq = 0

    def ask(self, size: int = 0, payload: int = 0, acked: int = 0) -> bool:
        """Send a request; returns whether it is carried out."""
        self.seq += 1
        frames = [encode(self.seq, acked, m.SetUpdater("s", bytes(size))), bytes(payload)]
        return self.answerer.take(b"one", frames) is not None

    def refusal(self) -> str:
        *_, (_, frames) = self.hub.receive(0.0)
        envelope, _ = decode(frames)
        assert isinstance(envelope.body, m.Failed)
        return envelope.body.text


def test_values_that_wait_for_one_member_have_a_bound() -> None:
    desk = Desk(10_000)
    assert desk.ask(payload=6000)
    assert not desk.ask(payload=6000)
    text = desk.refusal()
    assert "2 requests of this member wait" in text
    assert "10000 in all are kept for one member" in text
    assert desk.ask(payload=3000)
    desk.answerer.answer(b"one", 1, m.Done(), lambda: [bytes(100)])
    assert desk.ask(payload=3000)
    desk.answerer.answer(b"one", 3, m.Done(), lambda: [bytes(7000)])
    assert not desk.ask(), "answers that it does not confirm are kept"
    assert desk.ask(acked=3)


def test_messages_that_a_member_leaves_unread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(10_000)
    monkeypatch.setattr(desk.listener, "unsent_bytes", lambda peer: 9_999)
    assert not desk.ask()
    assert "it leaves 9999 bytes unread" in desk.refusal()


def test_requests_of_one_member_that_wait_have_a_bound_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(float("inf"))
    count = limits.MAX_KEPT_HEADS // 2**20
    assert all(desk.ask(2**20 - 100) for _ in range(count))
    assert not desk.ask(2**20 - 100)
    assert f"at most {limits.MAX_KEPT_HEADS} bytes without values" in desk.refusal()
