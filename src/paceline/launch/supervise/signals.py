"""Signals as bytes in a pipe, so that one selector loop handles them with everything else."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from paceline import forks

#: Signals that end a job. One that is ignored when the launcher starts (``nohup``, ``&``) stays ignored.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalPipe:
    """Catches SIGCHLD and the signals that end a job, for as long as the ``with`` block runs (main thread only)."""

    def __enter__(self) -> SignalPipe:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        caught = [signum for signum in ENDING if signal.getsignal(signum) is not signal.SIG_IGN]
        self._before = {signum: signal.signal(signum, _noted) for signum in (signal.SIGCHLD, *caught)}
        forks.in_children(self, SignalPipe._restore)
        return self

    def _restore(self) -> None:
        """Handle signals as before: in a child they must not end the launcher's job."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
        signal.set_wakeup_fd(-1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._write_fd)

    def read(self) -> list[int]:
        """Return the signals that end a job and came since the last call, in order, repeated ones included."""
        try:
            return [signum for signum in os.read(self.fd, 4096) if signum != signal.SIGCHLD]
        except BlockingIOError:
            return []


def _noted(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has already written the number into the pipe."""


@contextmanager
def held() -> Iterator[set[signal.Signals]]:
    """Block the signals that end a job while a child is made; yields the mask that the child must restore."""
    before = {signal.Signals(signum) for signum in signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)}
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def restore_in_child(mask: set[signal.Signals]) -> None:
    """Undo the launcher's changes to signals in a new child, so that none reaches the launcher's pipe."""
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, *ENDING):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
