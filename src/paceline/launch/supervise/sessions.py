"""Find and signal everything that a process has started.

Every child of the launcher leads a session of its own. What it starts stays in that session, in whatever process
group, unless it makes a session of its own (a daemon that calls ``setsid``).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_STOPPED = frozenset({b"T", b"t"})
_DEAD = frozenset({b"Z", b"X", b"x"})

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class _Process(NamedTuple):
    """A live process; ``cpu_s`` is the time that it and its children that have ended have used."""

    pid: int
    group: int
    session: int
    state: bytes
    cpu_s: float


def living(sessions: Collection[int]) -> set[int]:
    """Return those of the given sessions that have a live process; zombies do not count."""
    return {one.session for one in _scan() if one.session in sessions}


def cpu_s(sessions: Collection[int]) -> dict[int, float]:
    """Return how much CPU time the processes of each of the given sessions have used; nothing for one that is over."""
    found: dict[int, float] = defaultdict(float)
    for one in _scan():
        if one.session in sessions:
            found[one.session] += one.cpu_s
    return found


def stopped() -> set[int]:
    """Return the processes that a signal has stopped."""
    return {one.pid for one in _scan() if one.state in _STOPPED}


def send(signum: int, sessions: Collection[int]) -> None:
    """Send a signal to every process of the given sessions; continue stopped ones, so that they can handle it.

    Whole process groups are signalled, so a process that is forked meanwhile is not missed.
    """
    for group in {one.group for one in _scan() if one.session in sessions}:
        # ESRCH: its last process exited meanwhile. EPERM: it runs as another user now; only root could end it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signum)
            if signum != signal.SIGKILL:
                os.killpg(group, signal.SIGCONT)


def _scan() -> Iterator[_Process]:
    """Give every live process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # pid (name) state parent group session …, where the name may contain spaces and brackets
                text = Path("/proc", name, "stat").read_bytes()
                state, _, group, session, *more = text[text.rindex(b")") + 2 :].split(maxsplit=15)[:15]
                if state not in _DEAD:
                    yield _Process(int(name), int(group), int(session), state, sum(map(int, more[7:])) / _TICKS_PER_S)
