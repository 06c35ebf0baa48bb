"""Questions to the scheduler of a running job."""

from __future__ import annotations

import socket
import threading

import pytest

from paceline.cli import main, running
from paceline.cli.running import ask, asking
from paceline.errors import LaunchError
from paceline.launch import runtime
from paceline.net.security import Security, new_job_key
from paceline.net.sockets import SocketListener
from paceline.wire import messages as m


def record_of(address: str, key: str) -> runtime.JobRecord:
    return runtime.JobRecord("1a2b", 0, "", 0.0, "", (), 0, 0, address, key)


def test_scheduler_that_is_silent_is_named_with_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        said = f"the scheduler of job 1a2b at {where} was asked for a trace and did not answer within 0.1 s"
        with pytest.raises(LaunchError, match=said), asking(record_of(where, "k" * 40), "a trace") as asked:
            asked(m.AskTrace(1, 1, 1.0, 0))


def test_scheduler_that_has_ended_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        where = f"tcp://127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(LaunchError, match=f"no process listens where the scheduler of job 1a2b at {where} was"):
        ask(record_of(where, new_job_key()))


def test_answer_that_cannot_be_read_ends_the_question() -> None:
    key = new_job_key()
    listener = SocketListener(["tcp://127.0.0.1:*"], Security(key), "scheduler")

    def answer() -> None:
        while not (arrived := listener.receive(1.0)):
            pass
        listener.send(arrived[0][0], [b"of another version"])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(LaunchError, match="answers with what this paceline cannot read: use the version of the"):
            ask(record_of(listener.addresses[0], key))
    finally:
        thread.join()
        listener.close()


@pytest.mark.parametrize(
    ("address", "key", "message"),
    [
        ("127.0.0.1:9091", "k" * 40, "it is an address of the form tcp://HOST:PORT"),
        ("tcp://127.0.0.1:9091", "short", "the job key has 5 characters, not 40"),
    ],
)
def test_address_and_key_that_cannot_be_are_refused_at_once(
    address: str, key: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_JOB_KEY", key)
    assert main(["top", "--once", "--scheduler", address]) == 2
    assert message in capsys.readouterr().err
