"""The short jobs with which ``paceline up`` measures: each is a ``paceline launch`` whose output is kept."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import BinaryIO

from paceline.errors import LaunchError
from paceline.launch.supervise.child import die_with_parent

#: How often the progress is asked for.
_TICK_S = 1.0

#: Lines of a failed job that are shown.
_SHOWN_LINES = 30


class TerminatedError(Exception):
    """SIGTERM came."""


def output_of(
    words: Sequence[str], what: str, environ: Mapping[str, str], deadline_s: float, tick: Callable[[int], None]
) -> str:
    """Run ``paceline launch`` and return all that it printed. However this ends, nothing of it is left running.

    Args:
        words: options and command.
        what: its purpose, for errors.
        environ: its environment.
        deadline_s: how long it may take.
        tick: called now and then with its process id.

    Raises:
        LaunchError: it failed, with its last lines; or took too long.
        TerminatedError: SIGTERM came.
    """
    with tempfile.TemporaryFile() as out:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "paceline", "launch", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,  # Ctrl-C comes once, from here
            preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
        before = signal.signal(signal.SIGTERM, _terminated)
        try:
            code = _wait(launcher, deadline_s, tick)
        finally:
            _end(launcher)
            signal.signal(signal.SIGTERM, before)
        text = _text(out)
    if code is None:
        raise LaunchError(f"{what} did not end within {deadline_s:g} s; its last lines:\n{_last(text)}")
    if code:
        raise LaunchError(f"{what} failed with exit code {code}; its last lines:\n{_last(text)}")
    return text


def _wait(launcher: subprocess.Popen[bytes], deadline_s: float, tick: Callable[[int], None]) -> int | None:
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        try:
            return launcher.wait(_TICK_S)
        except subprocess.TimeoutExpired:
            tick(launcher.pid)
    return None


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Interrupt a launcher that still runs, and wait until it has ended its processes; Ctrl-C makes it kill them."""
    while launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.wait()
        except (KeyboardInterrupt, TerminatedError):
            continue


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise TerminatedError


def _text(out: BinaryIO) -> str:
    out.seek(0)
    return out.read().decode(errors="replace")


def _last(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines()[-_SHOWN_LINES:])
