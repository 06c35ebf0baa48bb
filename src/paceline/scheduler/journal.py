"""The job's log of membership as a file: a JSON object per line, beside the events of the job's processes.

| line | says |
|---|---|
| ``{"change": {...}, "unix": ...}`` | a :class:`~paceline.wire.messages.Change`, and when |
| ``{"dealt": {...}}`` | a :class:`~paceline.wire.messages.Dealt` |

:mod:`paceline.data.replay` reads it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import IO

import msgspec

from paceline.config import Settings
from paceline.errors import LaunchError
from paceline.observe import ring
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: Name of the file, in the folder of the job's rings.
FILE_NAME = "membership.jsonl"


class Journal:
    """Writes the log of one job. A job goes on where it cannot be written."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._file: IO[bytes] | None = None
        self._is_off = not settings.recorder

    def write(self, new: Sequence[m.Change | m.Dealt]) -> None:
        """Append what is new."""
        if not new or self._is_off:
            return
        try:
            if self._file is None:
                path = ring.made_folder(self._settings) / FILE_NAME
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                self._file = open(file, "ab", buffering=0)  # noqa: SIM115 - as long as the process
            self._file.write(b"".join(_line(one) for one in new))
        except (OSError, LaunchError) as error:
            self._is_off = True
            logger.warning("the log of membership of this job is not written: %s", error)


def _line(one: m.Change | m.Dealt) -> bytes:
    fields = msgspec.structs.asdict(one)
    said = {"change": fields, "unix": round(time.time(), 3)} if isinstance(one, m.Change) else {"dealt": fields}
    return msgspec.json.encode(said) + b"\n"
