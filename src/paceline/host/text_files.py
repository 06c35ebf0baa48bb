"""Writes text files whole: a full disk leaves a file as it was."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_text(path: str | Path, text: str, mode: int = 0o666) -> None:
    """Write a file, or replace it; a device or a pipe of that name is written to.

    Raises:
        OSError: it cannot be written, and is as it was.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
        real.write_text(text, encoding="utf-8")
        return
    new = real.with_name(f"{real.name}.new")
    try:
        new.unlink(missing_ok=True)  # in a folder of all users a link could stand there
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(real)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
