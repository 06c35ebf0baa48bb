"""Errors under Horovod's names."""

from paceline.collectives.errors import CollectiveError as HorovodInternalError
from paceline.collectives.errors import NotInitializedError, RankEndedError

__all__ = ["HorovodInternalError", "NotInitializedError", "RankEndedError"]
