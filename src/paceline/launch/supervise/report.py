"""The report on a failed job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.exitcodes import describe_code
from paceline.launch.hosts import LOCALHOST
from paceline.launch.plan import Member
from paceline.launch.supervise.lifecycle import Failure

_RULE = b"-" * 78


def failure_block(
    failure: Failure, tail: Sequence[bytes], aftermath: Mapping[Member, int], host: str = LOCALHOST
) -> bytes:
    """Describe which process failed first, how, after how long, its last lines, and how the others exited.

    Args:
        failure: the first failure.
        tail: the last lines of the process that failed, as it printed them.
        aftermath: exit codes of the processes that exited by themselves afterwards.
        host: where it ran.
    """
    where = "" if host == LOCALHOST else f" on {host}"
    lines = [
        _RULE,
        f"{failure.member}{where} failed: {failure.reason}, {failure.after_s:.1f} s after the start".encode(),
    ]
    lines += [_hint(failure)] if failure.code == 137 else []
    lines += [b"its last lines:", *(b"    " + line for line in tail)] if tail else [b"it printed nothing"]
    others = [f"{member} ({describe_code(code)})" for member, code in aftermath.items()]
    lines += [b"also left: " + ", ".join(others).encode()] if others else []
    return b"\n".join([*lines, _RULE, b""])


def _hint(failure: Failure) -> bytes:
    return b"something outside the job killed it; if the machine ran out of memory, dmesg says so"
