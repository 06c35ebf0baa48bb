"""Every request is carried out once and answered, over a network that loses, repeats and reorders."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.net.answerer import Answerer
from paceline.net.base import Frames
from paceline.net.call import PROBE_AFTER_S, Call, way_of
from paceline.net.client import Client
from paceline.wire import Inbox, Outbox, encode, sequence
from paceline.wire import messages as m
from tests.net.memory_network import Fault, MemoryHub, MemoryListener, MemoryNetwork


class Side:
    """A server of commands: the first claim makes a peer a member."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.listener = MemoryListener(network, "memory://server")
        self.members: set[bytes] = set()
        self.answerer = Answerer(self.listener, self.members.__contains__)
        self.carried_out: Counter[str] = Counter()
        self.late: list[tuple[bytes, int, m.Command]] = []

    def serve(self, chance: random.Random) -> None:
        for peer, frames in self.listener.receive(0.0):
            taken = self.answerer.take(peer, frames)
            if taken is not None:
                self.carry_out(peer, taken[0], taken[1], chance)
        for peer, seq, body in self.late:
            self.answer(peer, seq, body)
        self.late.clear()

    def carry_out(self, peer: bytes, seq: int, body: m.Request, chance: random.Random) -> None:
        if isinstance(body, m.Claim):
            assert peer not in self.members, "a claim that was answered is carried out again"
            self.members.add(peer)
            self.answerer.answer(peer, seq, m.Done())
            return
        assert isinstance(body, m.Command)
        self.carried_out[body.body] += 1
        if chance.random() < 0.3:
            self.late.append((peer, seq, body))
        else:
            self.answer(peer, seq, body)

    def answer(self, peer: bytes, seq: int, body: m.Command) -> None:
        self.answerer.answer(peer, seq, m.CommandAnswer(body.body), lambda: [body.body.encode()])


def test_an_answer_that_is_under_way_is_not_sent_again_and_one_that_was_lost_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, now = MemoryNetwork(), 0.0
    side, hub = Side(network), MemoryHub(network)
    side.members.add(b"")
    side.answerer = Answerer(side.listener, lambda peer: True)
    client = Client(hub, clock=lambda: now)
    channel = client.connect("memory://server", "worker", "server 0")
    call = client.ask(channel, m.Command("sum", "of all"), "a sum")
    [(peer, frames)] = side.listener.receive(0.0)
    taken = side.answerer.take(peer, frames)
    assert taken is not None
    side.answer(peer, taken[0], m.Command("sum", "of all"))
    assert len(hub.receive(0.0)) == 1  # it is lost
    for sending, times in ((True, 0), (False, 1)):
        monkeypatch.setattr(side.listener, "is_sending", lambda peer, sending=sending: sending)
        now += PROBE_AFTER_S
        client.poll()
        [(peer, frames)] = side.listener.receive(0.0)
        assert side.answerer.take(peer, frames) is None, "it is a probe"
        assert not call.done
        client.poll()
        assert call.done == (times == 1)


def test_an_answer_tells_how_long_the_request_was_held_also_when_it_is_sent_again() -> None:
    network, now = MemoryNetwork(), 100.0
    side, hub = Side(network), MemoryHub(network)
    side.answerer = Answerer(side.listener, lambda peer: True, lambda: 7.0 * now)  # a clock of its own
    client = Client(hub, clock=lambda: now)
    channel = client.connect("memory://server", "worker", "server 0")
    call = client.ask(channel, m.Command("sum", "of all"), "a sum")
    now = 101.0
    [(peer, frames)] = side.listener.receive(0.0)
    taken = side.answerer.take(peer, frames)
    assert taken is not None
    now = 101.5
    side.answer(peer, taken[0], m.Command("sum", "of all"))
    assert len(hub.receive(0.0)) == 1  # it is lost
    now = 108.0
    assert side.answerer.take(peer, frames) is None, "it is answered again"
    client.poll()
    assert call.done
    assert call.held_s == pytest.approx(3.5)
    assert way_of([call], 99.0) == pytest.approx(4.5)
    assert way_of([call], 106.0) == pytest.approx(2.0)
    assert way_of([call], 109.0) == way_of([], 0.0) == 0.0


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 25), loss=st.sampled_from([0.0, 0.2, 0.5]))
def test_every_request_is_carried_out_once_and_every_answer_arrives(seed: int, requests: int, loss: float) -> None:
    chance = random.Random(seed)
    weights = [1.0, loss, loss / 2, loss / 2]
    faults: list[Fault] = ["deliver", "drop", "repeat", "late"]
    network = MemoryNetwork(lambda: chance.choices(faults, weights)[0])
    side, now = Side(network), 0.0
    client = Client(MemoryHub(network), clock=lambda: now)
    channel = client.connect("memory://server", "worker", "server 0")
    claim = client.claim(channel, m.Claim("worker", 0, b"token"))
    calls: list[Call] = []
    answers: list[tuple[str, str, bytes]] = []

    def ask(text: str) -> Call:
        def keep(body: m.Body, frames: Frames) -> None:
            assert isinstance(body, m.CommandAnswer)
            answers.append((text, body.body, bytes(frames[0])))

        return client.ask(channel, m.Command("echo", text), text, [text.encode()], keep)

    while not claim.done or len(client) or len(calls) < requests:
        now += PROBE_AFTER_S / 2
        assert now < 4000, "a request was never answered"
        for _ in range(chance.randint(0, 3)):
            if len(calls) < requests:
                calls.append(ask(f"request {len(calls)}"))
        side.serve(chance)
        client.poll()
    asked = [call.what for call in calls]
    assert sorted(answers) == sorted((text, text, text.encode()) for text in asked)
    assert side.carried_out == Counter(asked)
    assert side.answerer.damaged.count == 0


def test_memory_of_what_was_answered_does_not_grow() -> None:
    outbox: Outbox[str] = Outbox()
    inbox: Inbox[str] = Inbox()
    for number in range(1, 500):
        seq = outbox.add("request", 0.0)
        assert inbox.arrive(seq, outbox.acked)
        inbox.finish(seq, "result")
        assert outbox.answer(seq)
        assert (len(outbox), len(inbox)) == (0, 1)
        assert outbox.acked == number


def test_repeated_request_is_recognised_also_when_it_is_forgotten() -> None:
    inbox: Inbox[str] = Inbox()
    assert inbox.arrive(1, 0)
    assert inbox.result(1) is None
    inbox.finish(1, "one")
    assert not inbox.arrive(1, 0)
    assert inbox.result(1) == "one"
    assert inbox.arrive(3, 1)
    assert inbox.result(1) is None
    assert not inbox.arrive(1, 0)
    inbox.finish(1, "again")
    assert inbox.result(1) is None
    assert [inbox.knows(seq) for seq in (1, 2, 3, 4)] == [True, False, True, False]
    assert inbox.arrive(2, 0), "an older acknowledgement takes nothing back"


def test_numbers_that_no_sender_uses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox: Inbox[str] = Inbox()
    with pytest.raises(ValueError, match="up to 5"):
        inbox.arrive(5, 5)
    monkeypatch.setattr(sequence, "MAX_OUTSTANDING", 2)
    assert inbox.arrive(1, 0)
    assert inbox.arrive(2, 0)
    with pytest.raises(ValueError, match="more than 2"):
        inbox.arrive(3, 0)
    assert inbox.arrive(3, 1)


def test_outbox_tells_what_is_overdue_once_per_interval() -> None:
    outbox: Outbox[str] = Outbox()
    first, second = outbox.add("a", 0.0), outbox.add("b", 1.0)
    assert (outbox.content(first), len(outbox)) == ("a", 2)
    assert outbox.overdue(1.5, 1.0) == [first]
    assert outbox.overdue(2.0, 1.0) == [second]
    assert outbox.overdue(2.5, 1.0) == [first]
    assert outbox.answer(second)
    assert not outbox.answer(second)
    assert outbox.acked == 0
    assert outbox.answer(first)
    assert outbox.acked == 2
    assert outbox.content(first) is None


def side_and_peer() -> tuple[Side, MemoryHub]:
    network = MemoryNetwork()
    side, hub = Side(network), MemoryHub(network)
    hub.connect("memory://server", b"peer", "server 0")
    return side, hub


def test_message_that_is_no_request_is_counted_and_changes_nothing() -> None:
    side, hub = side_and_peer()
    for frames in ([b"noise"], [encode(1, 0, m.Done())], []):
        hub.send(0, frames)
    side.serve(random.Random(0))
    assert side.answerer.damaged.count == 3
    assert hub.receive(0.0) == []


def test_member_with_impossible_numbers_is_refused() -> None:
    side, hub = side_and_peer()
    side.members.add(b"peer")
    hub.send(0, [encode(3, 7, m.Command("echo", "x"))])
    side.serve(random.Random(0))
    assert side.answerer.damaged.count == 1
    assert not side.carried_out


def test_news_has_number_zero_and_is_not_kept() -> None:
    network = MemoryNetwork()
    side, news = Side(network), list[m.Body]()
    client = Client(MemoryHub(network), on_news=news.append)
    claim = client.claim(client.connect("memory://server", "worker", "server"), m.Claim("worker", 0, b""))
    side.serve(random.Random(0))
    [peer] = side.members
    side.answerer.answer(peer, 0, m.News([], True))
    client.poll()
    assert (claim.body, news) == (m.Done(), [m.News([], True)])


def test_outbox_forgets_what_is_dropped() -> None:
    outbox: Outbox[str] = Outbox()
    first, second = outbox.add("a", 0.0), outbox.add("b", 0.0)
    assert outbox.drop() == ["a", "b"]
    assert (len(outbox), outbox.acked, outbox.content(first), outbox.answer(second)) == (0, 2, None, None)
    assert outbox.add("c", 0.0) == 3
