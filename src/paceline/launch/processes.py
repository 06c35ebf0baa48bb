"""Processes of this host: those that a process has started, and those whose environment names a job.

Every child of the launcher leads a session of its own. Its processes stay in that session, in whatever process
group, unless they make their own (a daemon that calls ``setsid``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from paceline import config
from paceline.errors import LaunchError

_STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})
_DEAD = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})
_READY = frozenset({psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP})
_TRIES, _PAUSE_S = 100, 0.05


def birth(pid: int) -> str:
    """Return when a process began, in seconds after the start of the kernel, or nothing if it has ended.

    Process ids come again; pairs of an id and this time do not, and a change of the clock does not change them.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        booted, process = psutil.boot_time(), psutil.Process(pid)
        return "" if process.status() in _DEAD else f"{process.create_time() - booted:.2f}"
    return ""


def living(sessions: Collection[int]) -> set[int]:
    """Return those of the given sessions that have a live process; zombies do not count."""
    return {session for session, _ in _of(sessions)}


class Usage(NamedTuple):
    """How much CPU time processes have used, and whether one of them runs now, or waits for a processor or a disk."""

    cpu_s: float = 0.0
    is_ready: bool = False


def usage(sessions: Collection[int]) -> dict[int, Usage]:
    """Return the usage of the processes of each given session; no entry for a session that is over.

    The time of children that have ended counts.
    """
    found: dict[int, Usage] = defaultdict(Usage)
    for session, process in _of(sessions):
        with contextlib.suppress(psutil.NoSuchProcess):
            times, before = process.cpu_times(), found[session]
            cpu_s = times.user + times.system + times.children_user + times.children_system
            found[session] = Usage(before.cpu_s + cpu_s, before.is_ready or process.status() in _READY)
    return found


def stopped(pids: Collection[int]) -> set[int]:
    """Return those of the given processes that a signal has stopped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() in _STOPPED:
                found.add(pid)
    return found


def send(signum: int, sessions: Collection[int]) -> None:
    """Send a signal to every process of the given sessions; continue stopped ones, so that they can handle it.

    Whole process groups are signalled, so a process that is forked meanwhile is not missed.
    """
    groups = set()
    for _, process in _of(sessions):
        with contextlib.suppress(ProcessLookupError):
            groups.add(os.getpgid(process.pid))
    for group in groups:
        # ESRCH: its last process exited meanwhile. EPERM: it runs as another user now; only root could end it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signum)
            if signum != signal.SIGKILL:
                os.killpg(group, signal.SIGCONT)


def pass_on(signum: int, sessions: Collection[int]) -> None:
    """Send a signal to those processes of the given sessions that handle it.

    The others live on as if it had not come, but for SIGTSTP, which stops them, and SIGCONT. By SIGTSTP itself the
    kernel stops no process that no shell could continue, as these.
    """
    others = {int(signal.SIGTSTP): signal.SIGSTOP, int(signal.SIGCONT): signal.SIGCONT}.get(signum)
    for session, process in _of(sessions):
        meant = signum if _handles(process.pid, signum, process.pid == session) else others
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if meant is not None:
                os.kill(process.pid, meant)


def _handles(pid: int, signum: int, or_else: bool) -> bool:
    """Tell whether a process handles a signal; ``or_else`` where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")  # psutil does not know it
    except OSError:
        return or_else
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)


def wait_for(is_over: Callable[[], bool], limit_s: float, pause_s: float) -> bool:
    """Ask again and again whether something is over; return whether it was in time."""
    until = time.monotonic() + limit_s
    while not is_over():
        if time.monotonic() > until:
            return False
        time.sleep(pause_s)
    return True


def _of(sessions: Collection[int]) -> Iterator[tuple[int, psutil.Process]]:
    """Give the live processes of sessions, each with its session."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            session = os.getsid(pid)
            if session in sessions and (process := psutil.Process(pid)).status() not in _DEAD:
                yield session, process


@dataclass(frozen=True)
class MarkedProcess:
    """A process whose environment names a job."""

    pid: int
    uid: int
    job: str
    role: str
    rank: str
    born: str
    """See :func:`birth`."""
    age_s: float
    command: str


def marked(beginning: str = "") -> list[MarkedProcess]:
    """Return the processes of the jobs whose ids begin so, as far as this user may see them; not this process."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to somebody else
            environ = process.environ()
            job = environ.get(config.variable("job_id"), "")
            if job and job.startswith(beginning) and process.pid != os.getpid():
                found.append(_marked(process, job, environ))
    return found


def _marked(process: psutil.Process, job: str, environ: dict[str, str]) -> MarkedProcess:
    return MarkedProcess(
        process.pid,
        process.uids().effective,
        job,
        environ.get(config.variable("role"), ""),
        environ.get(config.variable("rank"), ""),
        birth(process.pid),
        time.time() - process.create_time(),
        " ".join(process.cmdline()).strip(),
    )


def kill(processes: Iterable[MarkedProcess]) -> None:
    """Kill processes, and those that they start meanwhile.

    Raises:
        LaunchError: some are left.
    """
    left = list(processes)
    meant = {(one.job, one.uid) for one in left}
    for _ in range(_TRIES):
        for one in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if birth(one.pid) == one.born:
                    os.kill(one.pid, signal.SIGKILL)
        left = [one for one in marked() if (one.job, one.uid) in meant]
        if not left:
            return
        time.sleep(_PAUSE_S)
    raise LaunchError(f"processes {', '.join(str(one.pid) for one in left)} cannot be killed")
