"""Every request is carried out once, in order, and answered, over a network that loses, repeats and reorders."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ProtocolError
from paceline.net import call
from paceline.net.answerer import Answerer
from paceline.net.base import Frames
from paceline.net.call import PROBE_AFTER_S, Call, ChannelRequests, way_of
from paceline.net.client import Client
from paceline.wire import Inbox, Outbox, Size, decode, encode, sequence
from paceline.wire import messages as m
from tests.net.memory_network import Fault, MemoryHub, MemoryListener, MemoryNetwork


class Side:
    """A server of commands: the first claim makes a peer a member."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.listener = MemoryListener(network, "memory://server")
        self.members: set[bytes] = set()
        self.answerer = Answerer(self.listener, self.members.__contains__)
        self.carried_out: list[str] = []
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
        self.carried_out.append(body.body)
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
def test_every_request_is_carried_out_once_in_order_and_answered(seed: int, requests: int, loss: float) -> None:
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
    assert side.carried_out == asked
    assert side.answerer.damaged.count == 0


def test_memory_of_what_was_answered_does_not_grow() -> None:
    outbox: Outbox[str] = Outbox()
    inbox: Inbox[str] = Inbox()
    for number in range(1, 500):
        seq = outbox.add("request", 0.0)
        assert inbox.arrive(seq, outbox.acked)
        inbox.finish(seq, "result")
        assert outbox.answer(seq)
        assert (len(outbox), len(inbox._seen), len(inbox._arrived)) == (0, 1, 1)
        assert outbox.acked == number


def test_repeated_request_is_recognised_also_when_it_is_forgotten() -> None:
    inbox: Inbox[str] = Inbox()
    assert inbox.arrive(1, 0)
    assert inbox.result(1) is None
    inbox.finish(1, "one")
    assert not inbox.arrive(1, 0)
    assert inbox.result(1) == "one"
    assert inbox.arrive(2, 1)
    assert inbox.result(1) is None
    assert not inbox.arrive(1, 0)
    inbox.finish(1, "again")
    assert inbox.result(1) is None
    assert inbox.arrive(3, 0), "an older acknowledgement takes nothing back"
    assert [inbox.knows(seq) for seq in (1, 2, 3, 4)] == [True, True, True, False]


def test_request_is_left_until_all_before_it_have_come() -> None:
    inbox: Inbox[str] = Inbox()
    assert inbox.arrive(1, 0)
    assert not inbox.arrive(3, 0)
    assert [inbox.knows(seq) for seq in (1, 2, 3)] == [True, False, False]
    assert inbox.arrive(2, 0)
    assert inbox.arrive(3, 0)
    assert inbox.arrive(7, 6), "4 to 6 are answered"
    inbox.finish(8, "of a stranger")
    assert inbox.arrive(9, 6)


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
    assert (outbox.since(first), outbox.since(second), len(outbox)) == (["a", "b"], ["b"], 2)
    assert outbox.overdue(1.5, 1.0) == [first]
    assert outbox.overdue(2.0, 1.0) == [second]
    assert outbox.overdue(2.5, 1.0) == [first]
    assert outbox.answer(second)
    assert not outbox.answer(second)
    assert outbox.acked == 0
    assert outbox.answer(first)
    assert outbox.acked == 2
    assert outbox.since(first) == []


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


def side_and_member() -> tuple[Side, Client, int]:
    """Return a side, a client that it has admitted, and the client's channel to it."""
    network = MemoryNetwork()
    side, client = Side(network), Client(MemoryHub(network))
    channel = client.connect("memory://server", "worker", "server 0")
    claim = client.claim(channel, m.Claim("worker", 0, b"token"))
    side.serve(random.Random(0))
    assert client.wait([claim], 0.0) is None
    return side, client, channel


def test_member_learns_at_once_that_its_request_cannot_be_read_and_later_ones_are_carried_out() -> None:
    side, client, channel = side_and_member()
    bad, good = (client.ask(channel, m.Command("echo", text), "an echo") for text in ("x" * 100_000, "good"))
    side.serve(random.Random(0))
    side.serve(random.Random(0))
    client.poll()
    assert (bad.done, good.done) == (True, True)
    assert good.body == m.CommandAnswer("good")
    with pytest.raises(ProtocolError, match=r"^server 0: not a message of this protocol: .* length <= 65536"):
        client.wait([bad], 0.0)
    assert (side.carried_out, side.answerer.damaged.count) == (["good"], 1)


def test_answer_that_cannot_be_read_is_the_error_of_its_call() -> None:
    side, client, channel = side_and_member()
    call = client.ask(channel, m.Command("echo", "x"), "an echo")
    [(peer, frames)] = side.listener.receive(0.0)
    taken = side.answerer.take(peer, frames)
    assert taken is not None
    side.answerer.answer(peer, taken[0], m.CommandAnswer("x" * 100_000))
    client.poll()
    with pytest.raises(ProtocolError, match=r"the answer of server 0 to an echo cannot be read: .* length <= 65536"):
        client.wait([call], 0.0)
    assert client.damaged.count == 1


def test_request_that_cannot_be_encoded_takes_no_number() -> None:
    requests = ChannelRequests(0, "server 0")
    with pytest.raises(OverflowError):
        requests.ask(Call("server 0", "a push", m.Heartbeat(2**70)), 0.0)
    assert requests.probe(PROBE_AFTER_S) == []
    good = Call("server 0", "a beat", m.Heartbeat(1))
    assert len(requests.ask(good, 0.0)) == 1
    assert (good.seq, len(requests)) == (1, 1)


def test_request_that_no_peer_takes_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "MAX_HEADER_BYTES", 100)
    requests = ChannelRequests(0, "server 0")
    with pytest.raises(
        ProtocolError, match=r"a lookup needs a message of 1\d\d bytes without values; server 0 takes at"
    ):
        requests.ask(Call("server 0", "a lookup", m.Lookup("s", ["key"] * 30)), 0.0)
    assert len(requests) == 0


def test_what_is_kept_is_counted_until_it_is_forgotten() -> None:
    inbox: Inbox[str] = Inbox()
    assert inbox.arrive(1, 0, size=Size(10, 100))
    assert inbox.arrive(2, 0, size=Size(20, 20))
    assert (len(inbox), inbox.kept) == (2, (30, 120))
    inbox.finish(1, "answer", Size(5, 5))
    assert inbox.kept == (25, 25)
    inbox.finish(7, "of a request that came before", Size(1, 1))
    assert inbox.kept == (26, 26)
    inbox.arrive(9, 7)
    assert (len(inbox), inbox.kept) == (0, (0, 0))
    inbox.finish(2, "too late", Size(5, 5))
    assert inbox.kept == (0, 0)


def test_all_from_the_first_lost_request_on_are_sent_again_once_for_all_probes_before() -> None:
    requests = ChannelRequests(0, "server 0")
    for number in range(4):
        requests.ask(Call("server 0", "a beat", m.Heartbeat(number)), 0.0)
    requests.answer(1)
    for probe in (1, 2):
        [[message]] = requests.probe(2 * probe * PROBE_AFTER_S)
        envelope, _ = decode([message])
        assert (envelope.seq, envelope.body) == (probe, m.Probe([2, 3, 4]))
    assert requests.again(1, []) == []
    again = [decode(message)[0] for message in requests.again(1, [3])]
    assert [(one.seq, one.acked, one.body.round) for one in again] == [(3, 1, 2), (4, 1, 3)]
    assert requests.again(2, [3, 4]) == [], "it was asked before they were sent again"
    requests.probe(9 * PROBE_AFTER_S)
    assert len(requests.again(3, [2])) == 3


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
    assert (len(outbox), outbox.acked, outbox.since(first), outbox.answer(second)) == (0, 2, [], None)
    assert outbox.add("c", 0.0) == 3
