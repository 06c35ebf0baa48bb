"""Bounds of the peers of a listener: low for one that holds the key and has not said who it is, higher for a member.

| bound | of a peer that has claimed nothing | of a member |
|---|---|---|
| bytes of a message | ``UNCLAIMED_BYTES`` | the listener's ``largest`` |
| messages that wait | ``UNCLAIMED_AHEAD`` | those of :mod:`paceline.net.received` |
| time between two messages | ``UNCLAIMED_S`` | none |
| connections | ``UNCLAIMED_PER_HOST`` of a host | one for each claim: a new one ends the last |

Beyond these bounds a connection ends. So does the oldest of a host that has claimed nothing when a new one is one too
many: a member claims its connection at once, so it seldom is that one, and it connects again.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from paceline.wire.limits import MAX_FRAME_BYTES, MAX_FRAMES

#: Bytes of the largest message before a claim: a ``Hello`` with the longest names, and a ``Claim``, are smaller.
UNCLAIMED_BYTES = 8 * 1024

#: Messages before a claim that wait for this process: each holds up to ``UNCLAIMED_BYTES``.
UNCLAIMED_AHEAD = 4

#: Seconds between two messages before a claim. One that waits for the answer to its claim asks after it more often.
UNCLAIMED_S = 30.0

#: Connections of one host that have claimed nothing; each has a thread. It must exceed those that the processes of a
#: host make before this process comes to their first claim.
UNCLAIMED_PER_HOST = 128

#: More than any message can have.
UNBOUNDED = (MAX_FRAMES + 1) * MAX_FRAME_BYTES

Peer = TypeVar("Peer")


class Allowance:
    """What the peer of a connection may send. Set by any thread, read by the one that reads the connection.

    Attributes:
        message_bytes: bytes of a message.
        silence_s: seconds between the ends of two messages.
    """

    def __init__(self, largest: int = UNBOUNDED) -> None:
        self.message_bytes, self.silence_s = largest, math.inf

    @classmethod
    def before_a_claim(cls) -> Allowance:
        """Return that of a peer that has not said who it is."""
        found = cls(UNCLAIMED_BYTES)
        found.silence_s = UNCLAIMED_S
        return found

    @property
    def is_low(self) -> bool:
        """Whether the peer has not said who it is."""
        return self.silence_s < math.inf

    def raise_to(self, largest: int) -> None:
        """Allow what a member may send."""
        self.message_bytes, self.silence_s = largest, math.inf

    def refusal(self, size: int) -> str:
        """Return why a message is too large."""
        who = "before its sender has said who it is" if self.is_low else "here"
        return f"a message of {size} bytes; at most {self.message_bytes} are taken {who}"


class Claims(Generic[Peer]):
    """The identities that are members', and the connections that have claimed nothing. The caller holds a lock."""

    def __init__(self) -> None:
        self._members: set[bytes] = set()
        self._others: dict[str, dict[Peer, None]] = {}
        """By host, in the order in which they came."""

    def __contains__(self, identity: bytes) -> bool:
        """Tell whether an identity is a member's."""
        return identity in self._members

    def claim(self, identity: bytes) -> None:
        """Note that an identity is a member's."""
        self._members.add(identity)

    def forget(self, identity: bytes) -> None:
        """Note that an identity is no member's any more."""
        self._members.discard(identity)

    def add(self, peer: Peer, host: str) -> Peer | None:
        """Note a connection that has claimed nothing; returns the one that must end for it."""
        others = self._others.setdefault(host, {})
        others[peer] = None
        if len(others) <= UNCLAIMED_PER_HOST:
            return None
        oldest = next(iter(others))
        self.remove(oldest, host)
        return oldest

    def remove(self, peer: Peer, host: str) -> None:
        """Note that a connection has ended, or has claimed something."""
        others = self._others.get(host, {})
        others.pop(peer, None)
        if not others:
            self._others.pop(host, None)
