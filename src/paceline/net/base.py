"""Frames of messages, those that are always sealed, those for which there was no memory, and a count of refusals."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from paceline.errors import RemoteError

logger = logging.getLogger(__name__)

#: Header and payload buffers of one message.
Frames: TypeAlias = Sequence[Any]


class SealedFrame(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a frame that every connection seals, whatever ``PACELINE_ENCRYPT`` says.

    It is one at its receiver, too. So it stays sealed when the receiver passes it on.
    """


def sealed(frame: np.ndarray[Any, np.dtype[np.uint8]]) -> SealedFrame:
    """Return a frame of the same memory that is sealed."""
    return frame.view(SealedFrame)


class LostFrame(bytes):
    """Stands for a large frame for which the receiver had no memory: empty, the other frames are whole.

    Attributes:
        size: bytes that were sent.
    """

    size = 0

    @classmethod
    def of(cls, size: int) -> LostFrame:
        """Return one that stands for so many bytes."""
        lost = cls()
        lost.size = size
        return lost


def check_memory(frames: Frames, what: str) -> None:
    """Raise if a frame is lost.

    Raises:
        RemoteError: with the bytes of the first that is.
    """
    for frame in frames:
        if isinstance(frame, LostFrame):
            raise RemoteError(f"there is no memory here for {what}: {frame.size / 2**20:.1f} MiB")


class Damaged:
    """Counts messages that change nothing, because they cannot be read or must not be sent; or refused connections.

    Such a message is treated as if it had been lost: a peer that needs an answer asks again.

    Args:
        what: the things that are counted, for the log.
    """

    def __init__(self, what: str = "message of") -> None:
        self.count, self._what = 0, what

    def note(self, peer: str, reason: object) -> None:
        """Count one of a peer."""
        self.count += 1
        # Logged when the count is a power of two: the first at once, and never a flood.
        if self.count & (self.count - 1) == 0:
            logger.warning("refused a %s %s (%d refused so far): %s", self._what, peer, self.count, reason)
