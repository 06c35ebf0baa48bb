"""When a worker under notice leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

import paceline
from paceline.errors import PacelineError
from paceline.wire import messages as m
from paceline.worker import notice
from paceline.worker.notice import Notice


class Session:
    rank, round = 1, 7
    failure: PacelineError | None = None

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.told: list[m.Body] = []
        self.is_closed = False

    def call_scheduler(self, body: m.Request, what: str) -> m.Body:
        self.told.append(body)
        return m.Done()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def one() -> Notice:
    session = Session()
    return Notice(session, session.asked.append)


def has_left(one: Notice) -> bool:
    session = one._session
    assert isinstance(session, Session)
    return session.is_closed


def test_worker_leaves_when_its_loop_asks_for_the_next_batch(one: Notice) -> None:
    for _ in range(2):
        one.batch()
        one.step()
    one.agreed("SIGTERM")
    with pytest.raises(SystemExit) as ended:
        one.batch()
    assert ended.value.code == 0
    assert has_left(one)


def test_worker_of_another_loop_leaves_at_the_end_of_its_step(one: Notice, caplog: pytest.LogCaptureFixture) -> None:
    one.step()
    one.agreed("SIGTERM")
    with pytest.raises(SystemExit):
        one.step()
    assert "its other samples of this epoch are left out" in caplog.text
    assert "store.leaving" in caplog.text


def test_loop_with_two_steps_for_a_batch_leaves_between_two_batches(one: Notice) -> None:
    for _ in range(3):
        one.batch()
        one.step()
        one.step()
    one.batch()
    one.agreed("SIGTERM")
    one.step()
    one.step()
    assert not has_left(one)
    with pytest.raises(SystemExit):
        one.batch()


def test_loop_that_walks_a_sampler_no_more_is_another_one(one: Notice) -> None:
    one.batch()
    one.batch()
    one.agreed("SIGTERM")
    one.step()
    assert not has_left(one)
    with pytest.raises(SystemExit):
        one.step()


def test_thread_beside_the_loop_does_not_leave(one: Notice) -> None:
    one.agreed("SIGTERM")
    thread = threading.Thread(target=one.batch)
    thread.start()
    thread.join()
    assert not has_left(one)


def test_samplers_give_back_and_those_that_are_gone_do_not(one: Notice) -> None:
    class Sampler:
        def __init__(self, name: str) -> None:
            self.name = name

        def give(self) -> m.GiveBack:
            return m.GiveBack(self.name, 0, 3)

    kept = Sampler("a")
    one.at_leave("a", kept.give)
    one.at_leave("b", Sampler("b").give)
    one.agreed("SIGTERM")
    with pytest.raises(SystemExit):
        one.batch()
    assert isinstance(one._session, Session)
    assert one._session.told == [m.GiveBack("a", 0, 3)]


def test_line_says_that_no_end_of_a_step_was_seen(
    one: Notice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice, "_QUIET_S", 0.0)
    monkeypatch.setattr(notice, "_active", one)
    said = threading.Event()
    monkeypatch.setattr(notice.logger, "warning", lambda text, *args: (caplog.records.append(text % args), said.set()))
    one.agreed("SIGTERM")
    assert said.wait(10)
    assert "let the loop end where store.leaving is True" in str(caplog.records[-1])


def test_notice_asks_the_scheduler(one: Notice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_active", one)
    paceline.notice("the machine\nis needed")
    assert isinstance(one._session, Session)
    assert one._session.told == [m.Notice(r"the machine\nis needed")]
    assert one.why == r"the machine\nis needed"


def test_notice_does_not_apply_outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_active", None)
    with pytest.raises(PacelineError, match=r"does not apply here.*hvd and --ddp"):
        paceline.notice()


def test_signal_is_a_notice_and_the_second_one_acts(one: Notice, monkeypatch: pytest.MonkeyPatch) -> None:
    acted: list[int] = []
    monkeypatch.setattr(notice, "_act", acted.append)
    monkeypatch.setattr(notice, "_active", one)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        one.listen()
        one.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert isinstance(one._session, Session)
        assert (one._session.asked, acted) == (["SIGTERM"], [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert acted == [signal.SIGTERM]
        one.heard("", "the job ends")
        assert acted == 2 * [signal.SIGTERM]
        one._stop_listening()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handler_of_the_script_stays(one: Notice) -> None:
    before = signal.signal(signal.SIGTERM, mine := lambda signum, frame: None)
    try:
        one.listen()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


ACTS = """
import hashlib, os, signal, threading, time
from paceline.worker import notice

class Session:
    rank, failure = 0, None
    def ask(self, why):
        if os.fork() == 0:  # a child has no handler of paceline
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        threading.Thread(target=one.heard, args=("", "the job ends")).start()

session = Session()
one = notice.Notice(session, session.ask)
notice.begin(one)
one.listen()
os.kill(os.getpid(), signal.SIGTERM)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # a long call, in which no handler of Python runs
"""


def test_refused_signal_ends_the_process_in_the_middle_of_a_call_and_children_have_no_handler() -> None:
    done = subprocess.run([sys.executable, "-c", ACTS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, f"{-signal.SIGTERM}\n"), done.stderr
