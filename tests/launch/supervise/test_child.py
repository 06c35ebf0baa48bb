"""Signals as bytes in a pipe."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from paceline.errors import LaunchError
from paceline.launch.supervise.child import Child, SignalPipe
from paceline.launch.supervise.guardian import Guardian


def test_signal_that_a_script_handles_is_not_told() -> None:
    """Grid Engine's notice, SIGUSR2, becomes SIGTERM: told as two signals it would kill the job at once."""
    before = signal.signal(signal.SIGUSR2, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        with SignalPipe() as pipe:
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGINT)
            assert pipe.read() == [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_limit_of_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refused)
    with pytest.raises(
        LaunchError, match=r"'true' cannot be run: there are as many processes .* \(ulimit -u, which is "
    ):
        Child(["true"], {}, lambda: None)
    monkeypatch.setattr(os, "fork", refused)
    with pytest.raises(
        LaunchError, match="no process can be started: there are as many processes and threads as may be"
    ):
        Guardian()
