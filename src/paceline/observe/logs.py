"""Logging with role and rank on every line."""

from __future__ import annotations

import logging

from paceline.config import Settings
from paceline.host.plain_text import plain

_CONNECTIONS, _MESSAGES = 1, 2


class PlainFormatter(logging.Formatter):
    """Shows control characters as text: lines have the words of other processes, and a terminal would obey them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return plain(super().format(record), "\n\t")


def set_up_logging(settings: Settings) -> None:
    """Send the log of a role process to stderr, role and rank on every line."""
    logging.basicConfig(level=_level(settings), handlers=[_handler(settings)])


def set_up_worker_logging(settings: Settings) -> None:
    """Send paceline's log of a worker to stderr if ``verbose`` asks for it. The script's own logging stays as it is."""
    log = logging.getLogger("paceline")
    if settings.verbose and not log.handlers:
        log.addHandler(_handler(settings))
        log.setLevel(_level(settings))
        log.propagate = False


def _handler(settings: Settings) -> logging.Handler:
    name = settings.role if settings.rank < 0 or settings.role == "scheduler" else f"{settings.role} {settings.rank}"
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(f"%(asctime)s %(levelname)s paceline {name}: %(message)s", "%H:%M:%S"))
    return handler


def _level(settings: Settings) -> str:
    if settings.verbose >= _MESSAGES:
        return "DEBUG"
    return "INFO" if settings.verbose >= _CONNECTIONS else settings.log_level.upper()
