"""The report on a process that failed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.exitcodes import describe_code
from paceline.launch.host_list import LOCALHOST
from paceline.launch.plan import ProcessName
from paceline.launch.supervise.blame import Failure

_RULE = b"-" * 78


def failure_block(
    failure: Failure, tail: Sequence[bytes], aftermath: Mapping[ProcessName, int], host: str = LOCALHOST
) -> bytes:
    """Describe which process failed first, how, after how long, its last lines, and how the others exited.

    Args:
        failure: the first failure.
        tail: the last lines of the process that failed, as it printed them.
        aftermath: exit codes of the processes that exited by themselves afterwards.
        host: its host.
    """
    head = f"failed: {failure.reason}, {failure.after_s:.1f} s after the start"
    others = [f"{member} ({describe_code(code)})" for member, code in aftermath.items()]
    more = [b"also left: " + ", ".join(others).encode()] if others else []
    return _block(failure, host, head, [*_hints(failure, tail), *_last_lines(tail), *more])


def lost_block(lost: Failure, tail: Sequence[bytes], host: str = LOCALHOST) -> bytes:
    """Describe a worker that died while the others went on.

    Args:
        lost: the worker, how it ended, and when.
        tail: the last lines that it printed.
        host: its host.
    """
    head = f"died {lost.after_s:.1f} s after the start, and the others went on: {lost.reason}"
    return _block(lost, host, head, _last_lines(tail))


def _block(failure: Failure, host: str, head: str, lines: Sequence[bytes]) -> bytes:
    where = "" if host == LOCALHOST else f" on {host}"
    return b"\n".join([_RULE, f"{failure.member}{where} {head}".encode(), *lines, _RULE, b""])


def _last_lines(tail: Sequence[bytes]) -> list[bytes]:
    return [b"its last lines:", *(b"    " + line for line in tail)] if tail else [b"it printed nothing"]


def _hints(failure: Failure, tail: Sequence[bytes]) -> list[bytes]:
    """Return what to do about failures that are known."""
    if failure.code == 137:
        return [b"something outside the job killed it; if the machine ran out of memory, dmesg says so"]
    if any(b"address already in use" in line.lower() for line in tail):
        return [
            b"another program has its port; if that is MASTER_PORT, leave it unset for a free one, or choose another: "
            b"--env MASTER_PORT=29501"
        ]
    return []
