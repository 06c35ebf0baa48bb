"""What every worker says reaches every worker; what goes wrong names who."""

import os
import signal
import time

import pytest

from paceline.errors import DeadlineError, PacelineError, RemoteError
from paceline.testing import LocalJob, listen, tell
from paceline.wire.limits import MAX_GATHER_BYTES
from paceline.worker.current import current_session


def say_twice():
    """Gather under one name twice, with payloads of unlike sizes."""
    session = current_session()
    first = session.gather("sizes", b"x" * session.rank)
    second = session.gather("sizes", b"again %d" % session.rank)
    return [[len(one) for one in first], [one.decode() for one in second]]


def say_too_much():
    session = current_session()
    share = MAX_GATHER_BYTES // 2
    whole = session.gather("whole", bytes(share))
    try:
        session.gather("too much", bytes(share + 1))
    except RemoteError as error:
        with pytest.raises(ValueError, match="the payload has"):
            session.gather("alone", bytes(MAX_GATHER_BYTES + 1))
        return [len(one) for one in whole], str(error)
    return None


def leave_or_gather():
    session = current_session()
    if session.rank == 1:
        session.close()
        return None
    return [one.decode() for one in session.gather("rest", b"here", 20.0)]


def wait_for_the_other():
    """Worker 0 waits in a gather; worker 1 stays away, or is killed while it does."""
    session = current_session()
    tell("joined")
    if session.rank == 1:
        return listen()
    timeout_s = listen()
    started = time.monotonic()
    try:
        session.gather("models", b"mine", timeout_s)
    except PacelineError as error:
        return [type(error).__name__, str(error), time.monotonic() - started]
    return None


def test_everybody_gets_what_all_have_said_by_rank_every_time():
    with LocalJob(num_workers=3, num_servers=1) as job:
        assert job.run(say_twice) == [[[0, 1, 2], ["again 0", "again 1", "again 2"]]] * 3


def test_too_much_is_refused_to_all_and_the_job_goes_on():
    with LocalJob(num_workers=2, num_servers=1) as job:
        for sizes, text in job.run(say_too_much):
            assert sizes == [MAX_GATHER_BYTES // 2] * 2
            assert f"at most {MAX_GATHER_BYTES}" in text


def test_worker_that_has_left_is_not_waited_for_and_its_part_is_empty():
    with LocalJob(num_workers=2, num_servers=1) as job:
        assert job.run(leave_or_gather)[0] == ["here", ""]


def test_timeout_names_who_is_missing():
    with LocalJob(num_workers=2, num_servers=1) as job:
        waiting, absent = job.start_all(wait_for_the_other)
        assert [waiting.heard(30.0), absent.heard(30.0)] == ["joined", "joined"]
        waiting.tell(1.0)
        kind, text, took_s = waiting.result(30.0)
        absent.tell("go on")
        assert kind == DeadlineError.__name__
        assert "worker 0: gather 'models'" in text
        assert "it waits for worker 1 on" in text
        assert took_s < 20.0


def test_death_of_a_worker_ends_the_gather_of_the_others_and_names_it():
    with LocalJob(num_workers=2, num_servers=1) as job:
        waiting, absent = job.start_all(wait_for_the_other)
        assert [waiting.heard(30.0), absent.heard(30.0)] == ["joined", "joined"]
        waiting.tell(60.0)
        os.kill(absent.pid, signal.SIGKILL)
        kind, text, took_s = waiting.result(30.0)
        assert kind == "PeerDiedError"
        assert "worker 1 on" in text
        assert took_s < 20.0
