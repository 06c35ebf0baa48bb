"""Logging with role and rank on every line."""

from __future__ import annotations

import logging

from paceline.config import Settings


def set_up_logging(settings: Settings) -> None:
    """Send the log of a role process to stderr, role and rank on every line."""
    name = settings.role if settings.rank < 0 or settings.role == "scheduler" else f"{settings.role} {settings.rank}"
    logging.basicConfig(
        level=settings.log_level.upper(),
        format=f"%(asctime)s %(levelname)s paceline {name}: %(message)s",
        datefmt="%H:%M:%S",
    )
