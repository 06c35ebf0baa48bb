"""``paceline scheduler`` and ``paceline server``: run one role of a job."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from paceline import config, extensions
from paceline.cli.options import Option, Parser, UsageError

#: Options of both roles; each sets the field of its name, or of :data:`_FIELDS`.
_COMMON = (
    Option(("--scheduler",), "address of the scheduler", "tcp://HOST:PORT"),
    Option(("--num-workers",), "number of workers of the job", "N"),
    Option(("--num-servers",), "number of servers of the job", "S"),
    Option(("--job-id",), "name of the job, for logs", "NAME"),
    Option(
        ("--host",),
        "address to bind and to advertise (default: the one from which it reaches the scheduler)",
        "ADDRESS",
    ),
    Option(("--interface",), "network interface whose address to use", "NAME"),
    Option(("--insecure",), "no key: only for a network that nobody else can reach"),
    Option(("--timeout",), "how long any request may take (default: 300)", "SECONDS"),
    Option(("--start-timeout",), "how long to wait for all processes to join (default: 60)", "SECONDS"),
    Option(("--log-level",), "DEBUG, INFO, WARNING or ERROR (default: WARNING)", "LEVEL"),
)

OPTIONS: Mapping[str, tuple[Option, ...]] = {
    "scheduler": _COMMON,
    "server": (
        *_COMMON,
        Option(("--rank",), "rank of this server (default: the scheduler chooses)", "RANK"),
        Option(("--server-threads",), "threads for sums and updates (default: its share of the cores)", "N"),
        Option(
            ("--allow",),
            "an optimizer, codec, weighting or command of yours to import; may be repeated",
            "pkg.mod:Name",
            repeat=True,
        ),
    ),
}

_FIELDS = {"timeout": "timeout_s", "start_timeout": "start_timeout_s"}

_EPILOG = """\
Every option is also a variable: --num-workers is PACELINE_NUM_WORKERS. The job's key is only a variable,
PACELINE_JOB_KEY, because every user of a machine can read command lines. paceline launch sets all of them."""


def run(name: str, words: Sequence[str]) -> int:
    """Run a role until its job is over, and exit with its code."""
    options = Parser(name, OPTIONS[name], f"paceline {name} [options]", f"Run a {name} of a job.", _EPILOG).parse(words)
    settings = config.from_environment(role=name, **arguments(options))
    if not settings.scheduler:
        raise UsageError(
            "the address of the scheduler is missing; give --scheduler tcp://HOST:PORT or PACELINE_SCHEDULER"
        )
    extensions.hide_user_folders()
    role = importlib.import_module(f"paceline.{name}.process")  # only here, because it imports torch
    return _end(int(role.main(settings)))


def _end(code: int) -> NoReturn:
    """Exit as Python does, but take no module down: that takes half a second, and Triton may print its leaks."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, which an optimizer of the user's may have
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given as options.

    Raises:
        paceline.errors.ConfigError: a text does not fit its setting.
    """
    given = {name: value for name, value in vars(options).items() if value not in (None, False, [])}
    return {
        _FIELDS.get(name, name): config.parse(_FIELDS.get(name, name), _text(value), _flag(name))
        for name, value in given.items()
    }


def _text(value: str | bool | list[str]) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
