"""Finds the first cause of a failed job, and reports it to the user. Pure.

This is the only judge of a job that a launcher supervises. It hears the exit codes of all processes, and through the
scheduler the observations of the job's members: goodbyes with a reason, silence, lost connections. A process that fails
because of another one may exit before it, so the order of exits alone does not tell. The scheduler hears the exit
codes, too, and says which failure it heard of first.

| evidence | means |
|---|---|
| the scheduler, or the launcher itself, names a process (:meth:`Blame.name`) | that process failed first |
| an exit code that is neither 0 nor ``PEER_FAILED`` | the process failed, maybe because of another one |
| ``PEER_FAILED`` | the process failed because it lost another one |
| the scheduler repeats an exit code of ``PEER_FAILED`` | it runs, and knows no other failure either |
| the scheduler says that the others go on without a worker | that worker is no cause |
| the scheduler says that another process has taken over | nothing of its place is evidence any more |
| the scheduler runs, and does not say which failure was the first | it does not respond |

The cause is

1. the process that is named first;
2. else the first whose exit code is neither 0 nor ``PEER_FAILED``;
3. else the scheduler, if it does not respond: instead of 2, if it is stopped (SIGSTOP);
4. else the first that exited with ``PEER_FAILED``.

Its exit code is that of the job, or 1 if it has none. Exit codes that the launcher's own signals cause are no evidence:
the caller does not tell them.

Where the scheduler decides whether the others go on without a worker that dies, its exit is no failure until the
scheduler says so. It counts as one when the scheduler ends, or does not respond (:meth:`Blame.stop_waiting`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.host.exitcodes import PEER_FAILED, WORKER_LOST, describe_code, why_ended
from paceline.host.plain_text import plain
from paceline.launch.host_list import LOCALHOST
from paceline.launch.plan import SCHEDULER, ProcessName


@dataclass(frozen=True)
class Failure:
    """A process that failed, its exit code, what happened, and how long after the start."""

    member: ProcessName
    code: int
    reason: str
    after_s: float


@dataclass(frozen=True)
class _End:
    """The end of a process, as its exit tells it, or the word of another process."""

    at: float
    code: int
    """Its exit code, or that of the job where it has none."""
    reason: str
    """Of an exit: the knowledge of whoever runs the process, the engine or the launcher that lost its host."""


class Blame:
    """The evidence on one job that began at a time in seconds; later times are on the same clock.

    ``may_go_on``: the scheduler says of each worker that dies whether the others go on without it.
    """

    def __init__(self, began: float, has_scheduler: bool, may_go_on: bool = False) -> None:
        self._began, self._scheduler_runs, self._may_go_on = began, has_scheduler, may_go_on
        self._ends: dict[ProcessName, _End] = {}
        """Exits that are evidence, and those after the failure, in order."""
        self._survived: dict[ProcessName, _End] = {}
        self._named: tuple[ProcessName, _End] | None = None
        self._failed_at: float | None = None
        self._is_answered = False
        """The scheduler has told all that it knows of the failure."""

    # ---- evidence ----------------------------------------------------------------------------------------------------

    def note_exit(self, member: ProcessName, code: int, now: float, detail: str = "") -> None:
        """Note that a process has exited by itself; ``detail`` is the knowledge of whoever runs it."""
        if member == SCHEDULER:
            self._scheduler_runs = False
            self.stop_waiting(now)
        if not self.has_failed and (not code or (member == SCHEDULER and code == WORKER_LOST and self._survived)):
            return
        self._ends[member] = _End(now, code, detail)
        may_be_survived = self._may_go_on and self._scheduler_runs and member.role == "worker" and code != PEER_FAILED
        if member not in self._survived and not may_be_survived:
            self._fail(now)

    def note_goodbyes(self) -> None:
        """Note that all workers have left the job: from now on exit codes decide."""
        self._may_go_on = False

    def name(self, member: ProcessName, reason: str, now: float, code: int = 1) -> None:
        """Note that a process failed first. Only the first word counts."""
        if self._named is not None or self._is_answered:
            return
        if member in self._ends and reason == why_ended(PEER_FAILED):
            self._is_answered = True
        else:
            self._named = member, _End(now, code, reason)
        self._fail(now)

    def note_survived(self, member: ProcessName, reason: str, now: float) -> Failure | None:
        """Note that the others go on without a worker; returns how it died, None if the job has failed meanwhile."""
        if self.has_failed:
            return None
        self._survived[member] = _End(now, WORKER_LOST, reason)
        return self.survived[member]

    def note_joined(self, member: ProcessName) -> None:
        """Note that another process counts in the place of a worker that has died: the next death is another one."""
        self._survived.pop(member, None)
        self._ends.pop(member, None)

    def stop_waiting(self, now: float) -> None:
        """Count deaths as failures, unless the others are known to go on."""
        if self.awaits_verdict:
            self._fail(now)

    def suspect_scheduler(self, is_stopped: bool, now: float) -> None:
        """Note that the scheduler has had the time to say which failure was the first."""
        cause = self.cause
        if cause is None or self.is_settled or not self._scheduler_runs:
            return
        if cause.code == PEER_FAILED or is_stopped:
            self.name(SCHEDULER, "the others lost it: it runs, but does not respond", now)

    def _fail(self, now: float) -> None:
        self._failed_at = now if self._failed_at is None else self._failed_at

    # ---- verdict -----------------------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Whether the job has failed."""
        return self._failed_at is not None

    @property
    def awaits_verdict(self) -> bool:
        """Whether workers have died, and the scheduler has not said yet whether the others go on."""
        return not self.has_failed and any(member not in self._survived for member in self._ends)

    @property
    def is_settled(self) -> bool:
        """Whether nobody's end can tell more about why the job has failed."""
        cause = self.cause
        if cause is None or self._named is not None or self._is_answered:
            return cause is not None
        return cause.code > 128 or (cause.code != PEER_FAILED and not self._scheduler_runs)

    @property
    def cause(self) -> Failure | None:
        """The process that failed first; None as long as the job has not failed."""
        if self._failed_at is None:
            return None
        if self._named is not None:
            member, word = self._named
            return self._failure(member, word, self._failed_at)
        ends = [(member, end) for member, end in self._ends.items() if end.code and member not in self._survived]
        member, end = next((one for one in ends if one[1].code != PEER_FAILED), ends[0])
        return self._failure(member, _End(end.at, 1, why_ended(end.code)), end.at)

    @property
    def aftermath(self) -> dict[ProcessName, int]:
        """Exit codes of the other processes that exited by themselves, in order."""
        cause = self.cause
        others = {member: end.code for member, end in self._ends.items() if member not in self._survived}
        return {member: code for member, code in others.items() if cause is not None and member != cause.member}

    @property
    def survived(self) -> dict[ProcessName, Failure]:
        """The workers that died while the others went on."""
        return {member: self._failure(member, word, word.at) for member, word in self._survived.items()}

    @property
    def code(self) -> int:
        """The exit code of the job as things stand."""
        cause = self.cause
        return cause.code if cause is not None else WORKER_LOST if self._survived else 0

    def _failure(self, member: ProcessName, word: _End, at: float) -> Failure:
        """Return a failure with all that is known of it: the exit code, and what others saw."""
        end = self._ends.get(member, _End(at, 0, ""))
        reason = end.reason if end.code and word.reason == why_ended(end.code) else word.reason
        return Failure(member, end.code or word.code, describe(end.code, reason), at - self._began)


# ---- the report ------------------------------------------------------------------------------------------------------

_RULE = b"-" * 78

#: What PyTorch puts before the lines of a traceback.
_OF_RANK = re.compile(rb"^\[rank\d+\]:\s?")


def describe(code: int, reason: str = "") -> str:
    """Return in words how a process ended, and what others saw of it."""
    if code == 0:
        return reason
    ended = describe_code(code)
    reason = reason.removesuffix(f": {ended}")  # of an end that the scheduler was told by the same code
    return f"{ended}: {reason}" if reason else ended


def failure_block(
    failure: Failure,
    tail: Sequence[bytes],
    aftermath: Mapping[ProcessName, int],
    host: str = LOCALHOST,
    story: str = "",
) -> bytes:
    """Describe which process failed first, how, after how long, its last lines, and how the others exited afterwards.

    ``story`` is the job whose processes have left their last events; empty: none have.
    """
    head = f"failed: {failure.reason}, {failure.after_s:.1f} s after the start"
    others = [f"{member} ({describe_code(code)})" for member, code in aftermath.items()]
    more = [b"also left: " + ", ".join(others).encode()] if others else []
    more += [f"what all processes did last: paceline story {story}".encode()] if story else []
    return _block(failure, host, head, [*_hints(failure, tail), *_last_lines(tail), *more])


def lost_block(lost: Failure, tail: Sequence[bytes], host: str = LOCALHOST) -> bytes:
    """Describe a worker that died while the others went on."""
    head = f"died {lost.after_s:.1f} s after the start, and the others went on: {lost.reason}"
    return _block(lost, host, head, _last_lines(tail))


def _block(failure: Failure, host: str, head: str, lines: Sequence[bytes]) -> bytes:
    where = "" if host == LOCALHOST else f" on {host}"
    return b"\n".join([_RULE, plain(f"{failure.member}{where} {head}", "\n\t").encode(), *lines, _RULE, b""])


def _last_lines(tail: Sequence[bytes]) -> list[bytes]:
    return [b"its last lines:", *(b"    " + line for line in tail)] if tail else [b"it printed nothing"]


def _hints(failure: Failure, tail: Sequence[bytes]) -> list[bytes]:
    tail = [_OF_RANK.sub(b"", line) for line in tail]
    if failure.code == 137:
        return [b"something outside the job killed it; if the machine ran out of memory, dmesg says so"]
    if failure.member.role == "worker" and any(b"address already in use" in line.lower() for line in tail):
        return [
            b"another program has its port; if that is MASTER_PORT, leave it unset for a free one, or choose another: "
            b"--env MASTER_PORT=29501"
        ]
    if any(line.startswith((b"EOFError: EOF when reading a line", b"bdb.BdbQuit")) for line in tail):
        return [
            b"processes of a job have no stdin: give what is asked for as an argument; to use a debugger, run the "
            b'script alone, with kvstore.create("local")'
        ]
    return []
