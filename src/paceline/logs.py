"""Logging with role and rank on every line."""

from __future__ import annotations

import logging

from paceline.config import Settings

_CONNECTIONS, _MESSAGES = 1, 2


def set_up_logging(settings: Settings) -> None:
    """Send the log of a role process to stderr, role and rank on every line."""
    logging.basicConfig(level=_level(settings), format=_format(settings), datefmt=_TIME)


def set_up_worker_logging(settings: Settings) -> None:
    """Send paceline's log of a worker to stderr if ``verbose`` asks for it. The script's own logging stays as it is."""
    log = logging.getLogger("paceline")
    if settings.verbose and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_format(settings), _TIME))
        log.addHandler(handler)
        log.setLevel(_level(settings))
        log.propagate = False


_TIME = "%H:%M:%S"


def _format(settings: Settings) -> str:
    name = settings.role if settings.rank < 0 or settings.role == "scheduler" else f"{settings.role} {settings.rank}"
    return f"%(asctime)s %(levelname)s paceline {name}: %(message)s"


def _level(settings: Settings) -> str:
    if settings.verbose >= _MESSAGES:
        return "DEBUG"
    return "INFO" if settings.verbose >= _CONNECTIONS else settings.log_level.upper()
