"""Find and signal everything that a process has started.

Every child of the launcher leads a session of its own. What it starts stays in that session, in whatever process
group, unless it makes a session of its own (a daemon that calls ``setsid``).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

_STOPPED = frozenset({b"T", b"t"})
_DEAD = frozenset({b"Z", b"X", b"x"})


def living(sessions: Collection[int]) -> set[int]:
    """Return those of the given sessions that have a live process; zombies do not count."""
    return {session for _, _, session, _ in _scan() if session in sessions}


def stopped() -> set[int]:
    """Return the processes that a signal has stopped."""
    return {process for process, _, _, state in _scan() if state in _STOPPED}


def send(signum: int, sessions: Collection[int]) -> None:
    """Send a signal to every process of the given sessions; continue stopped ones, so that they can handle it.

    Whole process groups are signalled, so a process that is forked meanwhile is not missed.
    """
    for group in {group for _, group, session, _ in _scan() if session in sessions}:
        # ESRCH: its last process exited meanwhile. EPERM: it runs as another user now; only root could end it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signum)
            if signum != signal.SIGKILL:
                os.killpg(group, signal.SIGCONT)


def _scan() -> Iterator[tuple[int, int, int, bytes]]:
    """Give the id, the process group, the session and the state of every live process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # pid (name) state parent group session …, where the name may contain spaces and brackets
                text = Path("/proc", name, "stat").read_bytes()
                state, _, group, session = text[text.rindex(b")") + 2 :].split(maxsplit=4)[:4]
                if state not in _DEAD:
                    yield int(name), int(group), int(session), state
