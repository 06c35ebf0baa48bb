"""Errors of collective operations."""

from __future__ import annotations

from paceline.errors import PacelineError


class CollectiveError(PacelineError):
    """A collective operation failed on all ranks; the text says why, and because of which rank."""


class RankEndedError(CollectiveError):
    """A rank ended during an operation."""


class NotInitializedError(CollectiveError, ValueError):
    """``hvd.init()`` has not been called: in Horovod a ValueError of ``rank`` and its like, else an internal one."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")
