"""The command line: tables of options, and printing."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; see :func:`paceline.cli.app.main`.

    Args:
        words: the arguments without the program's name; those of this process by default.
    """
    try:
        from paceline.cli import app  # only here: Ctrl-C may come during imports

        return app.main(words)
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT


__all__ = ["main"]
