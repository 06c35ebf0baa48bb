"""Signals as bytes in a pipe."""

from __future__ import annotations

import signal

from paceline.launch.supervise.child import SignalPipe


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
