"""Tables of options. The parser uses them, and so does the search for the beginning of the user's command."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.naming import nearest, suggestion


class UsageError(Exception):
    """The command line is wrong. The text names the error, and the right form."""


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
            raise ValueError(f"{text!r} is not a whole number, as in {self.flags[0]} 2")
        return int(self._checked(int(text)))

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
        return number


class Parser(argparse.ArgumentParser):
    """A parser that raises :class:`UsageError` and suggests an option for an unknown one.

    Args:
        name: the subcommand.
        options: all that it takes.
        usage: its form.
        description: its purpose.
        epilog: end of the help.
        advice: what to do instead, by unknown option; that of ``""`` is for every other one. By default the error lists
            all options.
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
        self._options, self._advice = options, advice or {}
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
        parsed, rest = self.parse_known_args(words)
        for word in rest:
            if word.startswith("-"):
                raise UsageError(f"unknown option {word!r}{self._hint(word.partition('=')[0])}")
            raise UsageError(f"unexpected word {word!r}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError` instead of leaving the process."""
        text = message.removeprefix("argument ").replace("expected one argument", "needs a value after it")
        raise UsageError(text.replace("ignored explicit argument", "takes no value, but got"))

    def parse_named(self, words: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
        """Parse words among which are names, such as that of a job or a file; return the names and the options.

        Raises:
            UsageError: see :meth:`parse`.
        """
        by_flag = _by_flag(self._options)
        names: list[str] = []
        rest: list[str] = []
        index = 0
        while index < len(words):
            if words[index].startswith("-"):
                count = _count(words[index:], by_flag)
                rest += words[index : index + count]
                index += count
            else:
                names.append(words[index])
                index += 1
        return names, self.parse(rest)

    def _hint(self, flag: str) -> str:
        plain = flag.replace("_", "-")
        advice = self._advice.get(plain)
        meant = self._elsewhere.get(plain) or nearest(plain, self._flags)
        if meant and not advice:
            return f"; did you mean {meant!r}?"
        advice = advice or self._advice.get("")
        if advice:
            return f": {advice}"
        return f"; known are {', '.join(sorted(self._flags))}" if self._flags else "; there are no options here"

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


def _by_flag(options: Sequence[Option]) -> dict[str, Option]:
    return {flag: option for option in options for flag in option.flags}


def _count(words: Sequence[str], by_flag: Mapping[str, Option]) -> int:
    """Return how many words an option takes, which is the first one; one if it is unknown."""
    return by_flag[words[0]].words(words[1:]) if words[0] in by_flag else 1


def split_command(words: Sequence[str], options: Sequence[Option]) -> tuple[list[str], list[str]]:
    """Split words into our options and the user's command, which follows ``--`` or begins with the first other word."""
    by_flag = _by_flag(options)
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            return list(words[:index]), list(words[index + 1 :])
        if not word.startswith("-"):
            break
        index += _count(words[index:], by_flag)
    return list(words[:index]), list(words[index:])


def words_of(words: Sequence[str], options: Sequence[Option], keep: Callable[[Option], bool]) -> list[str]:
    """Return the words of some options, with their values.

    Args:
        words: words that are options only.
        options: all that may occur.
        keep: tells whether the words of an option are wanted.
    """
    by_flag = _by_flag(options)
    kept: list[str] = []
    index = 0
    while index < len(words):
        option = (
            by_flag.get(words[index]) or by_flag.get(words[index].partition("=")[0]) or by_flag.get(words[index][:2])
        )  # -n2
        count = _count(words[index:], by_flag)
        if option is None or keep(option):
            kept += words[index : index + count]
        index += count
    return kept
