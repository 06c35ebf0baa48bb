"""Scripts without a main guard, in which a worker spawns children: a ``DataLoader``, ``multiprocessing``.

A spawned child imports the main module. Without ``if __name__ == "__main__":`` it runs the training too, as a second
worker of the same rank. Such a child ends with one line that names the guard, the first one of its parent only; and the
error of the parent, that a child has ended, is shown in one line. A file tells the others: none of them has a
connection to another one.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from pathlib import Path

SENTENCE = 'the script has no main guard (if __name__ == "__main__":)'
_LINE = (
    f"paceline: {SENTENCE}: a DataLoader or multiprocessing has spawned this process, which imports the script and so "
    'runs all of it. Put what trains under the guard, or let the DataLoader fork: multiprocessing_context="fork"'
)


def end_child() -> None:
    """End this process if it is a spawned child that still imports the main module.

    Raises:
        SystemExit: it is; a traceback of the import would hide the text.
    """
    process = sys.modules.get("multiprocessing.process")  # every spawned child has it
    if process is None or not getattr(process.current_process(), "_inheriting", False):  # what multiprocessing asks
        return
    path = _file(os.getppid())
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_WRONLY, 0o600))
    except OSError:
        if _is_own(path):
            raise SystemExit(1) from None
    raise SystemExit(_LINE)


def ended_a_child() -> bool:
    """Return whether a child of this process has ended for want of a guard; forget it."""
    path = _file(os.getpid())
    if not _is_own(path):
        return False
    path.unlink(missing_ok=True)
    return True


def _is_own(path: Path) -> bool:
    """Return whether a file is there that this user has made: every user of the host can make one of that name."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return False


def _file(pid: int) -> Path:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:  # none can be written, so no file is there
        folder = os.sep
    return Path(folder, f"paceline-{os.geteuid()}-no-guard-{pid}")
