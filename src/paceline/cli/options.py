"""Tables of options. The parser uses them, and so does the search for the beginning of the user's command."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from paceline.launch import Host, parse_host_list, parse_hosts
from paceline.launch.preflight import command_words, read_text
from paceline.naming import nearest, suggestion


class UsageError(Exception):
    """The command line is wrong. The text names the error, and the right form."""


@contextlib.contextmanager
def usage_errors(where: str = "") -> Iterator[None]:
    """Make a ``ValueError`` of the block a :class:`UsageError`, whose text begins with ``where``."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{where}{error}") from error


@dataclass(frozen=True)
class Option:
    """One option; without a metavar it is a switch."""

    flags: tuple[str, ...]
    help: str
    metavar: str | None = None
    type: type[int] | type[float] | type[str] = str
    repeat: bool = False
    default: Any = None
    elsewhere: tuple[str, ...] = ()
    """Names of the same option in other launchers; an error suggests ours."""
    section: str = "options"
    """Heading in the help."""
    choices: tuple[str, ...] = ()
    """All words that it takes; empty: any."""
    least: int | None = None
    """Smallest number."""
    most: int = 2**53
    """Largest number; by default as large as both kinds of numbers are exact."""
    positive: bool = False
    """Whether a number must be above 0."""
    without: str | None = None
    """Its value where no number follows; None: it needs a value."""

    @property
    def name(self) -> str:
        """Attribute of the parsed value."""
        return self.flags[-1].removeprefix("--").replace("-", "_")

    def words(self, following: Sequence[str]) -> int:
        """Return how many words this option takes, with its own, if these follow."""
        has_value = self.metavar is not None and (
            self.without is None or (bool(following) and following[0].isdecimal())
        )
        return 2 if has_value else 1

    def value(self, text: str) -> Any:
        """Return the value of this option that a text stands for.

        Raises:
            ValueError: it cannot be its value; the message shows a valid one.
        """
        if self.choices and text not in self.choices:
            raise ValueError(f"{text!r} is unknown{suggestion(text, self.choices)}")
        if self.type is int:
            return self._whole_number(text)
        return self._number(text) if self.type is float else text

    def _whole_number(self, text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text.strip()):
            raise ValueError(f"{text!r} is not an integer, as in {self.flags[0]} 2")
        return int(self._checked(int(text) if len(text) < 100 else math.inf))

    def _number(self, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or (self.positive and not number > 0):
            raise ValueError(f"{text!r} is not a number{' above 0' if self.positive else ''}")
        return self._checked(number)

    def _checked(self, number: float) -> float:
        if self.least is not None and number < self.least:
            raise ValueError(f"{number:g} is too small; it is at least {self.least}")
        if number > self.most:
            raise ValueError(f"{number:.10g} is too large; it is at most {self.most}")
        return number


class Parser(argparse.ArgumentParser):
    """A parser that raises :class:`UsageError` and suggests an option for an unknown one.

    ``advice`` says what to do instead, by unknown option; that of ``""`` is for every other one. Without it the error
    lists all options.
    """

    def __init__(
        self,
        name: str,
        options: Sequence[Option],
        usage: str,
        description: str,
        epilog: str = "",
        advice: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            prog=f"paceline {name}",
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._advice = advice or {}
        self._flags = [flag for option in options for flag in option.flags]
        self._elsewhere = {flag: option.flags[0] for option in options for flag in option.elsewhere}
        sections = {option.section: self.add_argument_group(option.section) for option in options}
        for option in options:
            self._add(sections[option.section], option)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse words that are options only.

        Raises:
            UsageError: an option is unknown, lacks its value, or has one of the wrong type.
        """
        names, options = self.parse_named(words)
        if names:
            raise UsageError(f"unexpected word {names[0]!r}")
        return options

    def parse_named(self, words: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
        """Parse words among which are names, such as those of files; return the names and the options."""
        options, names = self.parse_known_args(words)
        for word in names:
            if word.startswith("-"):
                raise UsageError(f"unknown option {word!r}{self._hint(word.partition('=')[0])}")
        return names, options

    def parse_job(self, words: Sequence[str]) -> tuple[str, argparse.Namespace]:
        """Parse words among which one may name a job; return its name, empty if there is none, and the options."""
        names, options = self.parse_named(words)
        if len(names) > 1:
            raise UsageError(f"one job at a time, not {' and '.join(names)}")
        return "".join(names), options

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if arg_strings == ["--"]:  # argparse takes it for no value, and gives a list
            self.error(f"argument {'/'.join(action.option_strings)}: expected one argument")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError` instead of leaving the process."""
        text = message.removeprefix("argument ").replace("expected one argument", "needs a value after it")
        raise UsageError(text.replace("ignored explicit argument", "takes no value, but got"))

    def _hint(self, flag: str) -> str:
        plain = flag.replace("_", "-")
        meant = self._elsewhere.get(plain) or nearest(plain, self._flags)
        if advice := self._advice.get(plain) or (not meant and self._advice.get("")):
            return f": {advice}"
        return suggestion(meant or plain, self._flags) if self._flags else "; there are no options here"

    def _add(self, section: argparse._ArgumentGroup, option: Option) -> None:
        if option.metavar is None:
            section.add_argument(*option.flags, dest=option.name, help=option.help, action="store_true")
        else:
            action = "append" if option.repeat else "store"
            section.add_argument(
                *option.flags,
                dest=option.name,
                help=option.help,
                metavar=option.metavar,
                type=_argument(option),
                action=action,
                default=[] if option.repeat else option.default,
                nargs=None if option.without is None else "?",
                const=option.without,
            )


def _argument(option: Option) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        try:
            return option.value(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def _options_of(words: Sequence[str], options: Sequence[Option]) -> Iterator[tuple[Option | None, list[str]]]:
    """Give each option with its words, and every other word by itself."""
    by_flag = {flag: option for option in options for flag in option.flags}
    rest = list(words)
    while rest:
        first = rest[0]
        option = by_flag.get(first) or by_flag.get(first.partition("=")[0]) or by_flag.get(first[:2])  # -n2
        count = option.words(rest[1:]) if option is not None and first in option.flags else 1
        yield option, rest[:count]
        del rest[:count]


def split_command(words: Sequence[str], options: Sequence[Option]) -> tuple[list[str], list[str]]:
    """Split words into our options and the user's command, which follows ``--`` or begins with the first other word."""
    ours: list[str] = []
    for _, taken in _options_of(words, options):
        if taken[0] == "--":
            return ours, list(words[len(ours) + 1 :])
        if not taken[0].startswith("-"):
            break
        ours += taken
    return ours, list(words[len(ours) :])


def words_of(words: Sequence[str], options: Sequence[Option], keep: Callable[[Option], bool]) -> list[str]:
    """Return the words of the options that ``keep`` wants, with their values; ``words`` are options only."""
    return [word for option, taken in _options_of(words, options) if option is None or keep(option) for word in taken]


def read_hosts(word: str, *, number_is_slots: bool = False) -> tuple[Host, ...]:
    """Read a hostfile, or the list in its place; with ``number_is_slots`` ``name:4`` means four slots, not port 4.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
        UsageError: a line is wrong, or there is no word.
    """
    if not word.strip():
        raise UsageError("-H is empty; it takes a hostfile, or a list as in: -H h1,h2")
    more = "; it lists a host per line. For a list without a file write commas: -H h1,h2"
    one = "" if "/" in word else f" (of one host: -H {word},)"
    with usage_errors():
        if "," in word and not Path(word).is_file():
            return parse_host_list(word, number_is_slots=number_is_slots)
        return parse_hosts(read_text(word, "the hostfile", more + one), word, number_is_slots=number_is_slots)


def agrees(question: str, out: TextIO) -> bool:
    """Ask at the terminal, and return whether the answer is yes."""
    print(f"{question} [y/N] ", end="", file=out, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def shell_words(text: str) -> list[str]:
    """Split the command of ``--ssh`` as a shell would.

    Raises:
        UsageError: it is empty, or a quotation does not end.
    """
    with usage_errors():
        return command_words("--ssh", text)
