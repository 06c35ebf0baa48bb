"""Messages that cannot be used: counted, and logged without flooding the log."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Damaged:
    """Counts messages that change nothing, because they cannot be read or must not be sent.

    Such a message is treated as if it had been lost: whoever needs an answer asks again.
    """

    def __init__(self) -> None:
        self.count = 0

    def note(self, peer: str, error: Exception) -> None:
        """Count a message of a peer."""
        self.count += 1
        # Logged when the count is a power of two: the first at once, and never a flood.
        if self.count & (self.count - 1) == 0:
            logger.warning("refused a message of %s (%d refused so far): %s", peer, self.count, error)
