"""Writes the table and the picture of docs/planning.md: python -m benchmarks.plan"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from paceline.cli import main

PAGE = Path(__file__).parents[1] / "docs/planning.md"
_TABLE = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)


def command(page: str) -> list[str]:
    """Return the words of the page's command line, without the program."""
    found = re.search(r"```sh\npaceline (plan .*?)\n```", page, re.DOTALL)
    assert found is not None
    return shlex.split(found[1].replace("\\\n", " "))


def shown(words: list[str]) -> str:
    """Return the output of a command line."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(words) == 0
    return output.getvalue()


def table(page: str) -> str:
    """Return the output that the page has."""
    return _TABLE.findall(page)[0]


if __name__ == "__main__":
    text = PAGE.read_text()
    output = shown([*command(text), "--plot", str(PAGE.with_name("planning.png"))])
    PAGE.write_text(_TABLE.sub(lambda _: output, text, count=1))
