"""How a forked process is a program: it ends as the interpreter ends one, but leaves the modules as they are."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def be_program(run: Callable[[], object]) -> NoReturn:
    """Run a program in a forked process, and exit with its code.

    Threads are joined and functions run that were registered with ``atexit`` after the fork. An error that the program
    raises is shown as the interpreter shows it.
    """
    code = 1
    try:
        atexit._clear()
        code = _code_of(run)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _code_of(run: Callable[[], object]) -> int:
    try:
        _show_errors_of(run)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _show_errors_of(run: Callable[[], object]) -> None:
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - process border: as the interpreter does
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)  # it may exit with a code of its own
        raise SystemExit(1) from None
