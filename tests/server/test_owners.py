"""A server's requests to other servers over a network that loses, repeats and overtakes messages."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.net import call, client
from paceline.net.answerer import Answerer
from paceline.net.base import Frames
from paceline.server.process import OwnerClient
from paceline.wire import messages as m
from tests.net.memory_network import Fault, MemoryHub, MemoryListener, MemoryNetwork

MEMBERS = [m.Member("server", rank, 0, "h", f"host {rank}", 1, f"tcp://server-{rank}", b"t") for rank in range(2)]


class Owner:
    """The other end: answers requests of whom it has admitted."""

    def __init__(self, network: MemoryNetwork, token: bytes = b"t") -> None:
        self.listener = MemoryListener(network, MEMBERS[1].address)
        self.token = token
        self.members: set[bytes] = set()
        self.answerer = Answerer(self.listener, self.members.__contains__)
        self.carried_out: list[str] = []

    def serve(self) -> None:
        for peer, frames in self.listener.receive(0.0):
            request = self.answerer.take(peer, frames)
            if request is not None:
                seq, body, payload = request
                self.answerer.answer(peer, seq, self.answer(peer, body), lambda payload=payload: payload)

    def answer(self, peer: bytes, body: m.Request) -> m.Reply:
        if isinstance(body, m.Claim):
            if body.token != self.token:
                return m.Failed("ProtocolError", "wrong token")
            self.members.add(peer)
            return m.Done()
        assert isinstance(body, m.Command)
        if peer not in self.members:
            return m.Failed("ProtocolError", "claim it first")
        self.carried_out.append(body.head)
        return m.CommandAnswer(body.head)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unanswered requests are probed at once."""
    monkeypatch.setattr(call, "PROBE_AFTER_S", 0.0)
    monkeypatch.setattr(client, "CHECK_INTERVAL_S", 0.0)


def work(owner: Owner, asking: OwnerClient, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not until():
        assert time.monotonic() < deadline, "an answer is overdue"
        owner.serve()
        asking.poll()


@pytest.mark.usefixtures("impatient")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_every_request_is_carried_out_once_and_answered_once(seed: int) -> None:
    chance = random.Random(seed)
    faults: list[Fault] = ["deliver", "deliver", "drop", "repeat", "late"]
    network = MemoryNetwork(lambda: chance.choice(faults))
    owner, asking = Owner(network), OwnerClient(MemoryHub(network), MEMBERS[0], MEMBERS)
    heard: list[tuple[str, bytes]] = []
    for number in range(8):
        payload = b"%d" % number
        asking.ask(
            1, m.Command(str(number), ""), [payload],
            lambda body, frames: heard.append((body.body, bytes(frames[0]))),  # type: ignore[union-attr]
        )  # fmt: skip
    work(owner, asking, lambda: len(heard) == 8)
    assert sorted(owner.carried_out) == [str(number) for number in range(8)]
    assert sorted(heard) == [(str(number), b"%d" % number) for number in range(8)]


def test_requests_keep_their_order_and_wait_until_the_owner_knows_who_asks() -> None:
    network = MemoryNetwork()
    owner, asking = Owner(network), OwnerClient(MemoryHub(network), MEMBERS[0], MEMBERS)
    heard: list[m.Body] = []
    for number in range(5):
        asking.ask(1, m.Command(str(number), ""), (), lambda body, frames: heard.append(body))
    work(owner, asking, lambda: len(heard) == 5)
    assert owner.carried_out == [str(number) for number in range(5)]
    asking.ask(1, m.Command("later", ""), (), lambda body, frames: heard.append(body))
    work(owner, asking, lambda: len(heard) == 6)


@pytest.mark.usefixtures("impatient")
def test_an_answer_that_cannot_be_read_is_asked_for_again() -> None:
    network = MemoryNetwork()
    owner, asking = Owner(network), OwnerClient(MemoryHub(network), MEMBERS[0], MEMBERS)
    heard: list[m.Body] = []
    asking.ask(1, m.Command("first", ""), (), lambda body, frames: heard.append(body))
    [(peer, _)] = owner.listener.receive(0.0)
    owner.listener.send(peer, [b"\xc1 is no message"])
    work(owner, asking, lambda: bool(heard))
    assert heard == [m.CommandAnswer("first")]


def test_an_owner_that_does_not_admit_this_server_fails_what_it_is_asked() -> None:
    network = MemoryNetwork()
    owner, asking = Owner(network, token=b"other"), OwnerClient(MemoryHub(network), MEMBERS[0], MEMBERS)
    heard: list[m.Body] = []
    asking.ask(1, m.Command("first", ""), (), lambda body, frames: heard.append(body))
    work(owner, asking, lambda: bool(heard))
    asking.ask(1, m.Command("second", ""), (), lambda body, frames: heard.append(body))
    work(owner, asking, lambda: len(heard) == 2)
    assert heard == [m.Failed("ProtocolError", "wrong token"), m.Failed("ProtocolError", "claim it first")]


def test_an_exception_in_a_callback_ends_the_server() -> None:
    network = MemoryNetwork()
    owner, asking = Owner(network), OwnerClient(MemoryHub(network), MEMBERS[0], MEMBERS)

    def fail(body: m.Body, frames: Frames) -> None:
        raise ArithmeticError("no sum")

    asking.ask(1, m.Command("first", ""), (), fail)
    with pytest.raises(ArithmeticError, match="no sum"):
        work(owner, asking, lambda: False)


def test_a_listener_returns_when_something_arrives_at_a_hub_that_it_watches() -> None:
    network = MemoryNetwork()
    here, hub = MemoryListener(network, "here"), MemoryHub(network)
    here.watch_hub(hub)
    there = MemoryListener(network, "there")
    hub.send(hub.connect("there", b"me", "server 0"), [b"question"])
    [(peer, _)] = there.receive(1.0)
    frames: Frames = [b"answer"]
    there.send(peer, frames)
    started = time.monotonic()
    assert here.receive(20.0) == []
    assert time.monotonic() - started < 10.0
    [(_, answer)] = hub.receive(0.0)
    assert [bytes(frame) for frame in answer] == [b"answer"]
