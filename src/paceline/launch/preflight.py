"""Checks of the user's command before anything has started."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import ConfigError, LaunchError

#: A variable in a shell's text, or a name in quotes.
_READ = re.compile(r"""\$\{?([A-Za-z_]\w*)|["']([A-Za-z_]\w*)["']""")
_MOST_FILES, _MOST_CHARACTERS = 100, 1 << 18

#: Exit code of a job whose command does not exist, as shells have it.
NOT_FOUND_CODE = 127


class CommandNotFoundError(LaunchError):
    """The workers' command does not exist on this machine."""


def check_command(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Make sure that a command exists, as a shell would find it.

    A script that Python is given must exist too; otherwise every worker would start only to report that it does not.
    """
    word = argv[0]
    script = _script(argv)
    if script is not None and not Path(script).exists():
        raise CommandNotFoundError(f"the script {script!r} does not exist in {Path.cwd()}")
    if shutil.which(word, path=env.get("PATH", os.defpath)) is None:
        raise CommandNotFoundError(f"{_why(word)}{_hint(argv)}")


def _script(argv: Sequence[str]) -> str | None:
    """Return the script that a command gives to a Python interpreter, or None."""
    if not re.fullmatch(r"python[0-9.]*", Path(argv[0]).name):
        return None
    words = iter(argv[1:])
    for word in words:
        if word in ("-W", "-X"):
            next(words, None)
        elif not word.startswith("-"):
            return word
        elif word.startswith(("-c", "-m")) or word == "-":
            return None
    return None


def variables_read(argv: Sequence[str]) -> set[str]:
    """Return names of variables that a command reads, as far as its words, its files and modules beside them show it.

    Shells read ``$NAME``; other languages have the name in quotes.
    """
    files = [path for path in map(Path, argv) if os.path.isfile(path) and path.suffix in (".py", ".sh", ".bash", "")]
    beside = [path for file in files if file.suffix == ".py" for path in sorted(file.parent.glob("*.py"))]
    texts = [*argv, *map(_beginning, dict.fromkeys([*files, *beside[:_MOST_FILES]]))]
    return {name for text in texts for names in _READ.findall(text) for name in names if name}


def _beginning(path: Path) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_MOST_CHARACTERS)
    return ""


def _why(word: str) -> str:
    if Path(word).is_dir():
        return f"the command {word!r} is a directory"
    if Path(word).exists() and os.sep in word:
        return f"the command {word!r} is not an executable file"
    where = "does not exist" if os.sep in word else "is not on the PATH"
    return f"the command {word!r} {where}"


def _hint(argv: Sequence[str]) -> str:
    word = argv[0]
    if " " in word:
        return "; give the command as words, not as one quoted string"
    if word.endswith(".py"):
        return f"; did you mean: python {' '.join(argv)}"
    if Path(word).is_file():
        return f"; make it one: chmod +x {word}" if os.sep in word else f"; did you mean: ./{' '.join(argv)}"
    return ""


def command_words(option: str, text: str) -> list[str]:
    """Split a command that is the value of an option, as a shell would.

    Raises:
        ValueError: it is empty, or a quotation does not end.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{option} {text!r}: {error}") from error
    if not words:
        raise ValueError(f"{option} is empty; it takes a command")
    return words


def check_program(name: str, package: str) -> None:
    """Make sure that a program exists here.

    Raises:
        LaunchError: it does not; with the package to install.
    """
    if shutil.which(name) is None:
        raise LaunchError(f"the program {name!r} is not on the PATH of this machine; install the package {package}")


def read_text(path: str, what: str, more: str = "") -> str:
    """Return the text of a file that the user names, without the mark with which editors on Windows begin it.

    Messages call it ``what``, and end with ``more``.

    Raises:
        ConfigError: it cannot be read; the message says why.
    """
    if not path:
        raise ConfigError(f"{what} {path!r} cannot be read: its name is empty{more}")
    try:
        return Path(path).read_text(encoding="utf-8").removeprefix("\ufeff")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(f"{what} {path!r} cannot be read: {why}{more}") from error


def make_folder(path: str, what: str) -> None:
    """Make a folder, unless there is one, in which this process can write.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{what} {path!r} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{what} {path!r} cannot be written to")
