from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from paceline.config import Settings
from paceline.errors import ConfigError
from paceline.host.interfaces import interfaces
from paceline.membership import GONE
from paceline.net import hosts
from paceline.net.hosts import own_address, process_state


def test_name_of_the_scheduler_that_is_known_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a Kubernetes whose scheduler gets its pod after a server."""
    resolve, asked = socket.getaddrinfo, []

    def known_late(host: str, *more: object, **others: object) -> object:
        asked.append(host)
        if len(asked) < 5:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", *more, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(hosts, "_RESOLVE_S", 0.01)
    caplog.set_level("WARNING", logger="paceline")
    monkeypatch.setattr(socket, "getaddrinfo", known_late)
    assert own_address(Settings(scheduler="tcp://pl-1a2b-scheduler-0:9091")) == "127.0.0.1"
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("the scheduler's name pl-1a2b-scheduler-0 is not known; asking for it for ")


def test_name_of_the_scheduler_that_stays_unknown_is_an_error() -> None:
    said = "the scheduler at tcp://no-such-host.invalid:1 cannot be reached: "
    with pytest.raises(ConfigError, match=said):
        own_address(Settings(scheduler="tcp://no-such-host.invalid:1", start_timeout_s=0.01))


def test_address_towards_a_scheduler_may_be_one_of_both_kinds() -> None:
    assert own_address(Settings(scheduler="tcp://127.0.0.1:1")) == "127.0.0.1"
    if "::1" in {one.address for one in interfaces()}:
        assert own_address(Settings(scheduler="tcp://[::1]:1")) == "::1"


def test_process_that_has_ended_is_told_from_one_that_runs() -> None:
    assert process_state(os.getpid()).letter in ("R", "S")
    ended = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    assert ended.stdout is not None
    ended.stdout.read()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(ended.pid).letter in GONE, "its parent has not removed it yet"
    ended.communicate()
    assert process_state(ended.pid).letter in GONE


def test_process_is_ready_if_any_of_its_threads_is() -> None:
    program = "import threading; threading.Thread(target=lambda: [print(flush=True), max(iter(int, 1))]).start()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as computes:
        assert computes.stdout is not None
        computes.stdout.readline()
        before = process_state(computes.pid)
        while (now := process_state(computes.pid)).cpu_s == before.cpu_s:
            assert now.letter == "R"
        computes.kill()
    assert before.letter == "R", "the first thread of it waits for the other one"
