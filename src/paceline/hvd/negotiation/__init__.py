"""Negotiation: which operations are ready on all ranks, and in which order all ranks run them. Pure."""

from paceline.hvd.negotiation.cache import RankCache, Submission
from paceline.hvd.negotiation.fusion import fuse
from paceline.hvd.negotiation.machine import Negotiation
from paceline.hvd.negotiation.words import (
    GLOBAL_SET,
    Batch,
    Down,
    LogText,
    NegotiationSettings,
    Request,
    Response,
)

__all__ = [
    "GLOBAL_SET",
    "Batch",
    "Down",
    "LogText",
    "Negotiation",
    "NegotiationSettings",
    "RankCache",
    "Request",
    "Response",
    "Submission",
    "fuse",
]
