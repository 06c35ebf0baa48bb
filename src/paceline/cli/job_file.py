"""The job file: ``paceline launch --config job.toml`` holds any option of the command line."""

from __future__ import annotations

import argparse
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.cli.options import Option, UsageError, usage_errors
from paceline.launch import group_from_table
from paceline.launch.preflight import read_text
from paceline.naming import suggestion

#: Tables of ``NAME = "VALUE"``, which are repeated options on the command line.
_TABLES = ("env", "env_worker", "env_server", "option")


def fill_in(options: argparse.Namespace, command: Sequence[str], table: Sequence[Option]) -> list[str]:
    """Set the options that the command line leaves out to those of the job file; return the command.

    ``options.group`` then holds groups instead of texts where the file has them. An empty command means that of the
    file.

    Raises:
        UsageError: the file cannot be read, or has a key that is no option.
    """
    found = _read(options.config)
    known = {flag.lstrip("-").replace("-", "_"): option for option in table for flag in option.flags}
    known.pop("config")
    seen: dict[str, str] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        name = known[name].name if name in known else name
        if name in seen:
            raise UsageError(f"{options.config}: {seen[name]!r} and {key!r} are the same option; give one")
        seen[name] = key
        if name == "command":
            words = _words(value, options.config)
            command = command or words
        elif name in ("group", "groups") and isinstance(value, dict):
            with usage_errors(f"{options.config}: "):
                options.group = options.group or [group_from_table(*one) for one in value.items()]
        elif name in _TABLES and isinstance(value, dict):
            texts = [f"{one}={_text(f'{key}.{one}', text, options.config)}" for one, text in value.items()]
            setattr(options, name, [*texts, *getattr(options, name)])
        elif name in known:
            with usage_errors(f"{options.config}: {key}: "):
                _set(options, known[name], key, value)
        else:
            names = sorted({option.flags[-1].removeprefix("--") for option in known.values()})
            raise UsageError(f"{options.config}: {key!r} is not an option{suggestion(key, names)}")
    return list(command)


def _read(path: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(read_text(path, "the job file"))
    except (ValueError, RecursionError) as error:  # lists in lists, thousands of them
        raise UsageError(f"the job file {path!r} is not TOML: {error}") from error


def _set(options: argparse.Namespace, option: Option, key: str, value: object) -> None:
    before = getattr(options, option.name)
    if option.metavar is None:
        if not isinstance(value, bool):
            raise UsageError(f"{options.config}: {key} = {value!r} is neither true nor false")
        setattr(options, option.name, before or value)
        return
    is_list = isinstance(value, list) and (option.repeat or option.metavar == "HOSTS")
    texts = [_text(key, one, options.config) for one in (value if is_list else [value])]  # type: ignore[attr-defined]
    if option.repeat:
        setattr(options, option.name, [*texts, *before])
    elif before is None:
        text = ",".join([*texts, ""]) if is_list else texts[0]
        setattr(options, option.name, option.value(text))


def _text(key: str, value: object, source: str) -> str:
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(f"{source}: {key} = {value!r}; it takes one text or number")


def _words(value: object, source: str) -> list[str]:
    if isinstance(value, list):
        return [_text("command", one, source) for one in value]
    if not isinstance(value, str):
        raise UsageError(f"{source}: command = {value!r}; it is a text, or a list of words")
    with usage_errors(f"{source}: command = {value!r}: "):
        return shlex.split(value)
