"""``paceline agent``."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cli.options import Parser
from paceline.launch.remote.agent import main

_DESCRIPTION = """\
Start and watch the processes of one host, for a launcher that talks to it on stdin and stdout. It ends everything it
has started when its stdin ends. paceline launch starts it on each host."""


def run(name: str, words: Sequence[str]) -> int:
    """Serve a launcher until it hangs up.

    Raises:
        UsageError: there are options; it has none.
    """
    Parser(name, (), "paceline agent", _DESCRIPTION).parse(words)
    return main()
