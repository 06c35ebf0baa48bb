"""The command line: tables of options, and printing."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence

#: Errors of a file that takes no more, as stdout may be.
_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of this process, and return the exit code."""
    _open_standard_streams()
    try:
        from paceline.cli import app  # only here: Ctrl-C may come during imports

        try:
            return app.main(words)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT
    except ModuleNotFoundError as error:
        name = error.name or "paceline"
        if name.startswith("paceline"):
            raise
        advice = f"{sys.executable} -m pip install {name}"
        print(f"paceline: {sys.executable} has no package {name}, which paceline needs: {advice}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # as in: paceline status --watch | head
            return 141  # 128 + SIGPIPE
        print(f"paceline: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _open_standard_streams() -> None:
    """Open those that were closed (``<&-``): a pipe that got such a number would end in the place of another one.

    What stdout cannot encode is shown as an escape: names of files may hold any bytes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = open(os.devnull, mode)  # noqa: SIM115 - it gets the lowest free number, and stays open
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


__all__ = ["main"]
