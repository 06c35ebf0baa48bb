"""``paceline completion``: a script with which a shell completes commands, options and their values, made by shtab."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence

from paceline.cli import launch_options
from paceline.cli.app import COMMANDS
from paceline.cli.options import Option, Parser, UsageError
from paceline.consistency import weighting_names
from paceline.errors import MissingExtraError
from paceline.launch import names
from paceline.naming import suggestion

_SHELLS = ("bash", "zsh", "fish")
_DESCRIPTION = """\
Print a script that completes commands, options and their values. To use it in every new shell:

  bash   echo 'eval "$(paceline completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(paceline completion zsh)"' >> ~/.zshrc     (after compinit)
  fish   paceline completion fish > ~/.config/fish/completions/paceline.fish"""

#: Values that are words of a list; what an option's metavar lists (``stop|continue``) need not be here.
_VALUES: Mapping[str, Callable[[], Sequence[str]]] = {"--launcher": names, "--weighting": weighting_names}


def run(name: str, words: Sequence[str]) -> int:
    """Print the script for a shell."""
    shells = [word for word in words if not word.startswith("-")]
    usage = f"paceline completion {'|'.join(_SHELLS)}"
    Parser(name, (), usage, _DESCRIPTION).parse([word for word in words if word.startswith("-")])
    if len(shells) != 1 or shells[0] not in _SHELLS:
        unknown = suggestion(shells[0], _SHELLS) if shells else ""
        raise UsageError(f"one shell is needed: {usage}{unknown}")
    try:
        import shtab
    except ImportError:
        raise MissingExtraError("completion needs shtab: pip install 'paceline[completion]'") from None
    print(shtab.complete(_parser(shtab.FILE), shells[0]))
    return 0


def options_of(command: str) -> Sequence[Option]:
    """Return the options of a command, as its module has them."""
    if command == "profile":
        return (*_table(command), *launch_options.OPTIONS)
    return _table(command)


def _table(command: str) -> Sequence[Option]:
    module, _, function = COMMANDS[command][0].partition(":")
    table = () if function else getattr(importlib.import_module(module), "OPTIONS", ())
    return table[command] if isinstance(table, Mapping) else table


def _values(option: Option) -> Sequence[str]:
    """Return the words that an option takes; nothing: any, which shells complete as a file."""
    listed = [word for word in (option.metavar or "").split("|") if word.islower()]
    return _VALUES[option.flags[-1]]() if option.flags[-1] in _VALUES else listed


def _parser(file: object) -> argparse.ArgumentParser:
    """Return a parser of all commands, for shtab alone; ``file`` marks what a shell completes as a file."""
    parser = argparse.ArgumentParser("paceline")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    for command, (_, summary) in COMMANDS.items():
        one = commands.add_parser(command, help=summary, description=summary)
        for option in options_of(command):
            what = option.help.replace("%", "%%")
            if option.metavar is None:
                one.add_argument(*option.flags, help=what, action="store_true")
                continue
            nargs = None if option.without is None else "?"
            action = one.add_argument(*option.flags, help=what, nargs=nargs, choices=_values(option) or None)
            if action.choices is None:
                action.complete = file  # type: ignore[attr-defined]  # shtab reads it
        if command == "completion":
            one.add_argument("shell", choices=_SHELLS)
        else:
            one.add_argument("command", nargs=argparse.REMAINDER).complete = file  # type: ignore[attr-defined]
    return parser
