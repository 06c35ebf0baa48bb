"""The job file: ``paceline launch --config job.toml`` holds any option of the command line."""

from __future__ import annotations

import argparse
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.cli.options import Option, UsageError
from paceline.launch import Group, group_from_table
from paceline.naming import suggestion

#: Tables of ``NAME = "VALUE"``, which are repeated options on the command line.
_TABLES = ("env", "env_worker", "env_server", "option")


def fill_in(options: argparse.Namespace, command: Sequence[str], table: Sequence[Option]) -> list[str]:
    """Set the options that the command line leaves out to those of the job file; return the command.

    Args:
        options: of the command line; changed. ``options.group`` then holds groups instead of texts where the file has
            them.
        command: of the command line; empty means that of the file.
        table: all options.

    Raises:
        UsageError: the file cannot be read, or has what no option is called.
    """
    found = _read(options.config)
    known = {option.name: option for option in table}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name == "command":
            command = command or _words(value)
        elif name in ("group", "groups") and isinstance(value, dict):
            options.group = options.group or _groups(value, options.config)
        elif name in _TABLES and isinstance(value, dict):
            texts = [f"{one}={text}" for one, text in value.items()]
            setattr(options, name, [*texts, *getattr(options, name)])
        elif name in known and name != "config" and not isinstance(value, dict):
            _set(options, known[name], value)
        else:
            names = [one.replace("_", "-") for one in known]
            raise UsageError(f"{options.config}: {key!r} is not an option{suggestion(key, names)}")
    return list(command)


def _read(path: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"the job file {path!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"the job file {path!r} is not TOML: {error}") from error


def _set(options: argparse.Namespace, option: Option, value: object) -> None:
    if option.metavar is None:
        setattr(options, option.name, getattr(options, option.name) or bool(value))
    elif option.repeat:
        given = value if isinstance(value, list) else [value]
        setattr(options, option.name, [*map(str, given), *getattr(options, option.name)])
    elif getattr(options, option.name) is None:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        try:
            setattr(options, option.name, option.type(text))
        except ValueError:
            raise UsageError(f"{options.config}: {option.name} = {text!r} is not a number") from None


def _words(value: object) -> list[str]:
    return shlex.split(value) if isinstance(value, str) else list(map(str, value))  # type: ignore[call-overload]


def _groups(tables: Mapping[str, Any], source: str) -> list[Group]:
    try:
        return [group_from_table(name, table) for name, table in tables.items()]
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from error
