"""The programs of engines: calls and their output, and files that grow while a job runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO, TypeVar

from paceline.errors import LaunchError
from paceline.launch.preflight import check_program

_CALL_S = 60.0

T = TypeVar("T")


def run_program(
    words: list[str],
    package: str,
    text: str = "",
    environ: Mapping[str, str] | None = None,
    limit_s: float = _CALL_S,
    name: str = "",
) -> str:
    """Run a program of an engine and return its output; ``text`` is its stdin.

    ``package`` is what to install if it is missing; ``name`` is that of the call in messages.

    Raises:
        LaunchError: it is missing, does not answer, or fails; with its message.
    """
    check_program(words[0], package)
    name = name or words[0]
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, check=False, timeout=limit_s,
            env={**os.environ, **(environ or {})},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{name} did not answer within {limit_s:g} s") from None
    except OSError as error:
        raise LaunchError(f"{name} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise LaunchError(f"{name} refused: {said}")
    return done.stdout


class Patience:
    """Asks an engine that may not answer for a while, as when its controller starts again: a job goes on meanwhile."""

    def __init__(self, limit_s: float, say: Callable[[str], None] | None = None) -> None:
        self._limit_s, self._say = limit_s, say or _say
        self._silent_since: float | None = None

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Return an answer, or another value where there is none.

        Raises:
            LaunchError: there has been none for too long.
        """
        try:
            answer = question()
        except LaunchError as error:
            now = time.monotonic()
            if self._silent_since is None:
                self._silent_since = now
                self._say(f"{error}; asking again for {self._limit_s:g} s")
            if now >= self._silent_since + self._limit_s:
                raise
            return otherwise
        self._silent_since = None
        return answer


def _say(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)


class FileTail:
    """Shows the additions to a growing file, which need not exist yet, since the last look."""

    def __init__(self, path: Path, out: TextIO) -> None:
        self._path, self._out, self._shown = path, out, 0

    def show(self, *, is_over: bool = False) -> None:
        """Show the lines that are new; of a file that grows no more, its end without a line feed, too."""
        data = b""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._shown)
            data = file.read()
        data = data if is_over else data[: data.rfind(b"\n") + 1]
        self._shown += len(data)
        print(data.decode(errors="replace"), end="", file=self._out, flush=True)
