"""Hosts, and the command that reaches them, as words of the command line."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from paceline.cli.options import UsageError
from paceline.launch import Host, parse_host_list, parse_hosts
from paceline.launch.preflight import read_text


def read_hosts(word: str, *, number_is_slots: bool = False) -> tuple[Host, ...]:
    """Read a hostfile, or the list in its place.

    Args:
        word: path of a file, or names with commas between them.
        number_is_slots: ``name:4`` means four slots, not port 4.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
        UsageError: a line is wrong, or there is no word.
    """
    if not word.strip():
        raise UsageError("-H is empty; it takes a hostfile, or a list as in: -H h1,h2")
    if "," in word and not Path(word).is_file():
        return _checked(lambda: parse_host_list(word, number_is_slots=number_is_slots))
    more = "; it lists a host per line. For a list without a file write commas: -H h1,h2"
    one = "" if "/" in word else f", or {word}, for one host"
    text = read_text(word, "the hostfile", more + one)
    return _checked(lambda: parse_hosts(text, word, number_is_slots=number_is_slots))


def shell_words(flag: str, text: str) -> list[str]:
    """Split a command as a shell would.

    Raises:
        UsageError: it is empty, or a quotation does not end.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}: {error}") from error
    if not words:
        raise UsageError(f"{flag} is empty; it takes a command")
    return words


def _checked(parse: Callable[[], tuple[Host, ...]]) -> tuple[Host, ...]:
    try:
        return parse()
    except ValueError as error:
        raise UsageError(str(error)) from error
