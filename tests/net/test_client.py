"""Threads share a client: nobody is delayed, everybody gets the answers to its own calls."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from paceline.errors import AuthenticationError, PacelineError, PeerDiedError, ProtocolError, RemoteError
from paceline.net import call as call_module
from paceline.net import client as client_module
from paceline.net.answerer import Answerer
from paceline.net.base import Frames
from paceline.net.call import Call
from paceline.net.client import Client
from paceline.net.handshake import HandshakeError
from paceline.wire import messages as m
from tests.net.memory_network import Fault, MemoryHub, MemoryListener, MemoryNetwork

#: Of every wait in these tests that is expected to end sooner.
LONG_S = 20.0


class WatchedHub(MemoryHub):
    """A hub that fails when two threads send or receive at a time, and says when one waits in it."""

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(network)
        self.waits = threading.Event()
        self.reconnected: list[int] = []
        self.refusal: HandshakeError | None = None
        self.is_closed = False
        self._sends, self._receives = threading.Lock(), threading.Lock()

    def _exclusively(self, right: threading.Lock, use: Callable[[], object]) -> object:
        assert right.acquire(blocking=False), "two threads use the hub"
        try:
            assert not self.is_closed, "a closed hub is used"
            return use()
        finally:
            right.release()

    def send(self, channel: int, frames: Frames) -> None:
        self._exclusively(self._sends, lambda: MemoryHub.send(self, channel, frames))

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        if timeout_s:
            self.waits.set()
        return self._exclusively(self._receives, lambda: MemoryHub.receive(self, timeout_s))  # type: ignore[return-value]

    def reopened(self) -> list[int]:
        anew, self.reconnected = self.reconnected, []
        return anew

    def refused(self, channel: int) -> str:
        return self.refusal

    def close(self, linger_s: float = 0.0) -> None:
        with self._sends:
            self._exclusively(self._receives, lambda: MemoryHub.close(self, linger_s))
        self.is_closed = True


class Setting:
    """A client, its hub, and the peer that it asks."""

    def __init__(self, judge: Callable[[], Fault] = lambda: "deliver", **options: object) -> None:
        self.network = MemoryNetwork(judge)
        self.hub = WatchedHub(self.network)
        self.listener = MemoryListener(self.network, "memory://peer")
        self.client = Client(self.hub, **options)  # type: ignore[arg-type]
        self.channel = self.client.connect("memory://peer", "worker", "peer 0")
        self.answerer = Answerer(self.listener, lambda peer: True)
        self.follows = threading.Event()
        """A thread follows another one."""
        self._watch_followers()

    def _watch_followers(self) -> None:
        changed = self.client._changed
        wait_for = changed.wait_for

        def watched(predicate: Callable[[], object], timeout: float | None = None) -> object:
            self.follows.set()
            return wait_for(predicate, timeout)

        changed.wait_for = watched  # type: ignore[assignment, method-assign]

    def ask(self, text: str, **callbacks: object) -> Call:
        return self.client.ask(self.channel, m.Command("echo", text), text, **callbacks)  # type: ignore[arg-type]

    def requests(self, count: int) -> list[tuple[bytes, int, str]]:
        """Return the next requests at the peer, as (peer, number, text)."""
        found: list[tuple[bytes, int, str]] = []
        while len(found) < count:
            arrived = self.listener.receive(LONG_S)
            assert arrived, "a request did not arrive"
            for peer, frames in arrived:
                taken = self.answerer.take(peer, frames)
                if taken is not None:
                    assert isinstance(taken[1], m.Command)
                    found.append((peer, taken[0], taken[1].body))
        return found

    def answer(self, request: tuple[bytes, int, str]) -> None:
        peer, seq, text = request
        self.answerer.answer(peer, seq, m.CommandAnswer(text))

    def answer_together(self, requests: list[tuple[bytes, int, str]]) -> None:
        """Have answers arrive in one receive."""
        with self.network.changed:
            for request in requests:
                self.answer(request)


@pytest.fixture(autouse=True)
def _no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found at a check here: only what wakes a thread ends its wait."""
    monkeypatch.setattr(client_module, "CHECK_INTERVAL_S", 2 * LONG_S)
    monkeypatch.setattr(call_module, "PROBE_AFTER_S", 4 * LONG_S)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def answered(waiting: Future[Call | None]) -> bool:
    """Return whether a wait ended with its answers."""
    return waiting.result(LONG_S) is None


# ---- nobody is delayed -----------------------------------------------------------------------------------------------


def test_a_thread_that_asks_is_not_delayed_by_one_that_waits(threads: ThreadPoolExecutor) -> None:
    setting = Setting()
    first = setting.ask("first")
    waiting = threads.submit(setting.client.wait, [first], LONG_S)
    assert setting.hub.waits.wait(LONG_S)
    assert threads.submit(setting.ask, "second").result(LONG_S / 2).seq == 2
    requests = setting.requests(2)
    assert not waiting.done(), "the request went out while the other thread went on waiting"
    assert [text for _, _, text in requests] == ["first", "second"]
    setting.answer_together(requests)
    assert answered(waiting)


def test_requests_leave_in_the_order_of_their_numbers_whoever_sends_them(threads: ThreadPoolExecutor) -> None:
    setting = Setting()
    never = setting.ask("never")
    waiting = threads.submit(setting.client.wait, [never], LONG_S)
    asked = [list(threads.map(setting.ask, [f"{thread}.{one}" for one in range(50)])) for thread in range(8)]
    requests = setting.requests(401)
    assert [seq for _, seq, _ in requests] == list(range(1, 402))
    texts = {call.seq: call.what for calls in asked for call in calls}
    assert all(texts[seq] == text for _, seq, text in requests[1:])
    setting.answer_together(requests)
    assert answered(waiting)
    assert all(call.done for calls in asked for call in calls)


def test_a_thread_that_asks_alone_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting()
    monkeypatch.setattr(setting.hub, "wake", lambda: pytest.fail("there is nobody to wake"))
    calls = [setting.ask("one", on_answer=lambda body, frames: calls.append(setting.ask("two")))]
    setting.answer(*setting.requests(1))
    assert setting.client.wait(calls, LONG_S) is None
    setting.answer(*setting.requests(1))
    assert setting.client.wait(calls[1:], LONG_S) is None


# ---- several wait ----------------------------------------------------------------------------------------------------


def two_waiters(setting: Setting, threads: ThreadPoolExecutor) -> list[Future[Call | None]]:
    """Have two threads wait for a call each; returns the waits, first the one that drives."""
    calls = [setting.ask("first"), setting.ask("second")]
    driving = threads.submit(setting.client.wait, calls[:1], LONG_S)
    assert setting.hub.waits.wait(LONG_S)
    following = threads.submit(setting.client.wait, calls[1:], LONG_S)
    assert setting.follows.wait(LONG_S)
    return [driving, following]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_waiters_get_their_answers_one_after_the_other(threads: ThreadPoolExecutor, order: tuple[int, int]) -> None:
    setting = Setting()
    waits = two_waiters(setting, threads)
    requests = setting.requests(2)
    for index in order:
        setting.answer(requests[index])
        assert answered(waits[index])


def test_two_waiters_get_answers_that_arrive_together(threads: ThreadPoolExecutor) -> None:
    setting = Setting()
    waits = two_waiters(setting, threads)
    setting.answer_together(setting.requests(2))
    assert all(map(answered, waits))


def test_a_follower_keeps_its_deadline(threads: ThreadPoolExecutor) -> None:
    setting = Setting()
    waits = two_waiters(setting, threads)
    third = setting.ask("third")
    assert setting.client.wait([third], 0.02) is third
    assert not any(wait.done() for wait in waits)
    setting.answer_together(setting.requests(3))
    assert all(map(answered, waits))
    assert setting.client.wait([third], LONG_S) is None, "a late answer is used"


def test_answer_that_is_here_counts_although_the_deadline_passed_while_this_process_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    setting = Setting(clock=lambda: now)
    call = setting.ask("first")
    [request] = setting.requests(1)
    receive = setting.hub.receive

    def stopped(timeout_s: float) -> list[tuple[int, Frames]]:
        nonlocal now
        if now:
            return receive(timeout_s)
        now = 2 * LONG_S
        setting.answer(request)
        return []

    monkeypatch.setattr(setting.hub, "receive", stopped)
    assert setting.client.wait([call], LONG_S) is None


def test_a_follower_goes_on_when_the_driver_is_interrupted(threads: ThreadPoolExecutor) -> None:
    setting = Setting()

    def interrupt(body: m.Body, frames: Frames) -> None:
        raise KeyboardInterrupt

    first, second = setting.ask("first", on_answer=interrupt), setting.ask("second")

    def drive() -> str:
        try:
            setting.client.wait([first], LONG_S)
        except KeyboardInterrupt:
            return "interrupted"
        return "not interrupted"

    driving = threads.submit(drive)
    assert setting.hub.waits.wait(LONG_S)
    following = threads.submit(setting.client.wait, [second], LONG_S)
    assert setting.follows.wait(LONG_S)
    requests = setting.requests(2)
    setting.answer(requests[0])
    assert driving.result(LONG_S) == "interrupted"
    setting.answer(requests[1])
    assert answered(following)
    with pytest.raises(PacelineError, match="first at peer 0: KeyboardInterrupt while its answer was used"):
        setting.client.wait([first], LONG_S)


def test_a_thread_that_was_interrupted_before_it_could_stop_driving_drives_on(threads: ThreadPoolExecutor) -> None:
    setting = Setting()
    setting.client._driver = threading.get_ident()  # and KeyboardInterrupt
    first = setting.ask("first")
    following = threads.submit(lambda: setting.client.wait([setting.ask("second")], LONG_S))
    assert setting.client.wait([first], 0.02) is first
    setting.answer_together(setting.requests(2))
    assert setting.client.wait([first], LONG_S) is None
    assert answered(following)


def test_waiters_raise_what_the_check_raises_when_they_are_woken(threads: ThreadPoolExecutor) -> None:
    failure: list[Exception] = []

    def check() -> None:
        if failure:
            raise failure[0]

    setting = Setting(check=check)
    waits = two_waiters(setting, threads)
    failure.append(PeerDiedError("server 1 died"))
    setting.client.wake()
    for wait in waits:
        with pytest.raises(PeerDiedError, match="server 1 died"):
            wait.result(LONG_S)


# ---- closing ---------------------------------------------------------------------------------------------------------


def test_closing_ends_all_waits_and_then_closes_the_hub(threads: ThreadPoolExecutor) -> None:
    setting = Setting()
    waits = two_waiters(setting, threads)
    setting.client.close()
    assert setting.hub.is_closed
    for wait in waits:
        with pytest.raises(PacelineError, match="are closed"):
            wait.result(LONG_S)
    with pytest.raises(PacelineError, match="are closed"):
        setting.ask("late")
    setting.client.wake()
    setting.client.close()


def test_closing_waits_for_the_answers_that_are_being_used(threads: ThreadPoolExecutor) -> None:
    setting = Setting()
    used, go_on = threading.Event(), threading.Event()

    def use(body: m.Body, frames: Frames) -> None:
        used.set()
        assert go_on.wait(LONG_S)

    call = setting.ask("first", on_answer=use)
    waiting = threads.submit(setting.client.wait, [call], LONG_S)
    setting.answer(*setting.requests(1))
    assert used.wait(LONG_S)
    closing = threads.submit(setting.client.close)
    assert setting.follows.wait(LONG_S)
    assert not setting.hub.is_closed
    go_on.set()
    closing.result(LONG_S)
    assert answered(waiting)
    assert setting.hub.is_closed


def test_closing_leaves_a_hub_open_that_a_thread_does_not_let_go(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CLOSE_TIMEOUT_S", 0.01)
    setting = Setting()
    used, go_on = threading.Event(), threading.Event()

    def use(body: m.Body, frames: Frames) -> None:
        used.set()
        assert go_on.wait(LONG_S)

    waiting = threads.submit(setting.client.wait, [setting.ask("first", on_answer=use)], LONG_S)
    setting.answer(*setting.requests(1))
    assert used.wait(LONG_S)
    setting.client.close()
    assert not setting.hub.is_closed
    go_on.set()
    assert answered(waiting)


# ---- callbacks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiter", ["driver", "follower"])
def test_an_exception_in_a_callback_reaches_the_waiter_of_that_call(threads: ThreadPoolExecutor, waiter: str) -> None:
    setting = Setting()

    def fail(body: m.Body, frames: Frames) -> None:
        raise ArithmeticError("not a number")

    def bad() -> Call:
        return setting.ask("bad", on_answer=fail)

    calls = [bad(), setting.ask("good")] if waiter == "driver" else [setting.ask("good"), bad()]
    driving = threads.submit(setting.client.wait, calls[:1], LONG_S)
    assert setting.hub.waits.wait(LONG_S)
    following = threads.submit(setting.client.wait, calls[1:], LONG_S)
    assert setting.follows.wait(LONG_S)
    setting.answer_together(setting.requests(2))
    of_bad, of_good = (driving, following) if waiter == "driver" else (following, driving)
    with pytest.raises(ArithmeticError, match="not a number"):
        of_bad.result(LONG_S)
    assert answered(of_good)


def test_an_error_of_ours_in_a_callback_names_the_call_and_is_raised_once() -> None:
    setting = Setting()

    def fail(body: m.Body, frames: Frames) -> None:
        raise ProtocolError("7 frames")

    call = setting.ask("push of round 3", on_answer=fail)
    setting.answer(*setting.requests(1))
    with pytest.raises(ProtocolError, match=r"push of round 3 at peer 0: 7 frames"):
        setting.client.wait([call], LONG_S)
    assert setting.client.wait([call], LONG_S) is None


def test_poll_raises_what_a_callback_raises_and_not_what_a_peer_answers() -> None:
    setting = Setting()
    failures: list[m.Failed] = []

    def fail(body: m.Body, frames: Frames) -> None:
        raise ArithmeticError("not a number")

    calls = [setting.ask("refused", on_failed=failures.append), setting.ask("bad", on_answer=fail)]
    refused, bad = setting.requests(2)
    setting.answerer.answer(refused[0], refused[1], m.Failed("RemoteError", "no"))
    setting.client.poll()
    assert failures == [m.Failed("RemoteError", "no")]
    with pytest.raises(RemoteError, match="peer 0: no"):
        setting.client.wait(calls[:1], LONG_S)
    setting.answer(bad)
    with pytest.raises(ArithmeticError, match="not a number"):
        setting.client.poll()


def test_callbacks_run_in_the_order_of_arrival_and_may_ask() -> None:
    setting = Setting()
    order: list[str] = []
    more: list[Call] = []

    def keep(body: m.Body, frames: Frames) -> None:
        assert isinstance(body, m.CommandAnswer)
        order.append(body.body)
        more.append(setting.ask(f"after {body.body}"))

    calls = [setting.ask(text, on_answer=keep) for text in "abc"]
    requests = setting.requests(3)
    setting.answer_together([requests[2], requests[0], requests[1]])
    assert setting.client.wait(calls, LONG_S) is None
    assert order == ["c", "a", "b"]
    setting.answer_together(setting.requests(3))
    assert setting.client.wait(more, LONG_S) is None
    assert [call.what for call in more] == ["after c", "after a", "after b"]


def test_a_callback_that_waits_is_told_that_it_cannot() -> None:
    setting = Setting()
    other = setting.ask("other")
    call = setting.ask("first", on_answer=lambda body, frames: setting.client.wait([other], LONG_S) and None)
    setting.answer(setting.requests(2)[1])
    with pytest.raises(RuntimeError, match="must not wait"):
        setting.client.wait([call], LONG_S)


# ---- admission, refusal, lost connections ----------------------------------------------------------------------------


def test_calls_that_are_held_back_fail_with_the_claim() -> None:
    setting = Setting()
    claim = setting.client.claim(setting.channel, m.Claim("worker", 0, b""))
    held = setting.ask("held")
    [(peer, frames)] = setting.listener.receive(LONG_S)
    taken = setting.answerer.take(peer, frames)
    assert taken is not None
    assert held.seq == 0
    setting.answerer.answer(peer, taken[0], m.Failed("ProtocolError", "wrong token"))
    for call in (claim, held):
        with pytest.raises(ProtocolError, match="peer 0: wrong token"):
            setting.client.wait([call], LONG_S)


def test_all_calls_fail_when_the_peer_refuses_the_key() -> None:
    now = 0.0
    setting = Setting(clock=lambda: now)
    claim = setting.client.claim(setting.channel, m.Claim("worker", 0, b""))
    held = setting.ask("held")
    setting.hub.refusal = HandshakeError("the keys differ")
    setting.client.poll()
    for call in (claim, held):
        with pytest.raises(AuthenticationError, match=r"^peer 0 refuses this process: the keys differ"):
            call.raise_error()
    assert len(setting.client) == 0


def test_a_connection_that_was_lost_is_probed_at_once() -> None:
    setting = Setting()
    first = setting.ask("first")
    setting.listener.receive(LONG_S)  # the peer loses it
    setting.hub.reconnected = [setting.channel]
    setting.client.poll()
    for peer, frames in setting.listener.receive(LONG_S):
        assert setting.answerer.take(peer, frames) is None, "it is a probe"
    setting.client.poll()
    setting.answer(*setting.requests(1))
    assert setting.client.wait([first], LONG_S) is None


def test_a_message_that_cannot_be_read_is_counted_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    setting = Setting()
    first = setting.ask("first")
    [request] = setting.requests(1)
    for _ in range(3):
        setting.listener.send(request[0], [b"\xc1 is no message"])
    setting.answer(request)
    assert setting.client.wait([first], LONG_S) is None
    assert setting.client.damaged.count == 3
    assert caplog.text.count("refused a message of peer 0") == 2


# ---- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_many_threads_over_a_bad_network_get_each_answer_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CHECK_INTERVAL_S", 0.002)
    monkeypatch.setattr(call_module, "PROBE_AFTER_S", 0.002)
    chance = random.Random(seed)
    faults: list[Fault] = ["deliver", "drop", "repeat", "late"]
    setting = Setting(lambda: chance.choices(faults, [6, 1, 1, 1])[0])
    stop = threading.Event()
    carried_out: list[str] = []

    def serve() -> None:
        while not stop.is_set():
            for peer, frames in setting.listener.receive(0.05):
                taken = setting.answerer.take(peer, frames)
                if taken is not None:
                    assert isinstance(taken[1], m.Command)
                    carried_out.append(taken[1].body)
                    setting.answerer.answer(peer, taken[0], m.CommandAnswer(taken[1].body))

    def work(thread: int) -> list[str]:
        heard: list[str] = []
        for turn in range(20):
            calls = [
                setting.ask(f"{thread}.{turn}.{one}", on_answer=lambda body, frames: heard.append(body.body))
                for one in range(3)
            ]
            assert setting.client.wait(calls, LONG_S) is None
            assert sorted(heard[-3:]) == [call.what for call in calls]
        return heard

    with ThreadPoolExecutor(7) as threads:
        serving = threads.submit(serve)
        heard = [text for texts in threads.map(work, range(6)) for text in texts]
        setting.client.close()
        stop.set()
        serving.result(LONG_S)
    assert len(set(heard)) == len(heard) == 360
    assert sorted(carried_out) == sorted(heard)
