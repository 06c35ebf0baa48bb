"""Hosts as a word of the command line: a hostfile, or a list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.cli.options import UsageError
from paceline.errors import LaunchError
from paceline.launch import Host, parse_host_list, parse_hosts


def read_hosts(word: str, *, number_is_slots: bool = False) -> tuple[Host, ...]:
    """Read a hostfile, or the list in its place.

    Args:
        word: path of a file, or names with commas between them.
        number_is_slots: ``name:4`` means four slots, not port 4.

    Raises:
        LaunchError: there is no such file, or it cannot be read.
        UsageError: a line is wrong.
    """
    try:
        text = Path(word).read_text()
    except OSError as error:
        if "," in word:
            return _checked(lambda: parse_host_list(word, number_is_slots=number_is_slots))
        raise LaunchError(
            f"the hostfile {word!r} cannot be read: {error.strerror}; it lists a host per line. For a list without a "
            "file write commas: -H h1,h2"
        ) from error
    return _checked(lambda: parse_hosts(text, word, number_is_slots=number_is_slots))


def _checked(parse: Callable[[], tuple[Host, ...]]) -> tuple[Host, ...]:
    try:
        return parse()
    except ValueError as error:
        raise UsageError(str(error)) from error
