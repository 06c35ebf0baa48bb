"""Tables of options. The parser uses them, and so does the search for the beginning of the user's command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.naming import suggestion


class UsageError(Exception):
    """The command line is wrong. The text says what is wrong, and what would be right."""


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

    @property
    def name(self) -> str:
        """Attribute of the parsed value."""
        return self.flags[-1].removeprefix("--").replace("-", "_")


class Parser(argparse.ArgumentParser):
    """A parser that raises :class:`UsageError` and suggests an option for an unknown one."""

    def __init__(self, name: str, options: Sequence[Option], usage: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"paceline {name}",
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
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
        raise UsageError(message.removeprefix("argument ").replace("expected one argument", "needs a value after it"))

    def _hint(self, flag: str) -> str:
        ours = self._elsewhere.get(flag.replace("_", "-"))
        return f"; did you mean {ours!r}?" if ours else suggestion(flag, self._flags)

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
                type=_NUMBERS.get(option.type, option.type),
                action=action,
                default=[] if option.repeat else option.default,
            )


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, as in -n 2") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


_NUMBERS: dict[type, Callable[[str], Any]] = {int: _whole_number, float: _number}


def split_command(words: Sequence[str], options: Sequence[Option]) -> tuple[list[str], list[str]]:
    """Split words into our options and the user's command, which follows ``--`` or begins with the first other word."""
    takes_value = {flag for option in options if option.metavar is not None for flag in option.flags}
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            return list(words[:index]), list(words[index + 1 :])
        if not word.startswith("-"):
            break
        index += 2 if word in takes_value else 1
    return list(words[:index]), list(words[index:])
