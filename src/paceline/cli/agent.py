"""``paceline agent``."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cli.options import UsageError
from paceline.launch.remote.agent import main


def run(name: str, words: Sequence[str]) -> int:
    """Serve a launcher on stdin and stdout until it hangs up.

    Raises:
        UsageError: it was called by hand, with options.
    """
    if words:
        raise UsageError("an agent has no options; paceline launch starts it on each host and talks to it on its stdin")
    return main()
