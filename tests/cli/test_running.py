"""Questions to the scheduler of a running job."""

from __future__ import annotations

import socket

import pytest

from paceline.cli import running
from paceline.cli.running import asking
from paceline.errors import LaunchError
from paceline.launch import runtime
from paceline.wire import messages as m


def test_scheduler_that_is_silent_is_named_with_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        record = runtime.JobRecord("1a2b", 0, "", 0.0, "", (), 0, 0, where, "k" * 40)
        said = f"the scheduler of job 1a2b at {where} was asked for a trace and did not answer within 0.1 s"
        with pytest.raises(LaunchError, match=said), asking(record, "a trace") as ask:
            ask(m.AskTrace(1, 1, 1.0, 0))
