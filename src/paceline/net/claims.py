"""Bounds of the peers of a listener: low for one that holds the key and has not said who it is, higher for a member.

| bound | of a peer that has claimed nothing | of a member |
|---|---|---|
| bytes of a message | ``UNCLAIMED_BYTES`` | ``Bounds.largest`` |
| messages that wait to be taken | ``UNCLAIMED_AHEAD`` | those of :mod:`paceline.net.received` |
| bytes that wait to be sent | one message, or ``UNCLAIMED_UNSENT_BYTES`` | those of :mod:`paceline.net.answerer` |
| time between two messages | ``UNCLAIMED_S`` | none |
| connections | ``Bounds.of_a_host`` of a host | one for each claim: a new one ends the last |

Beyond these bounds a connection ends. So does the oldest of a host that has claimed nothing when a new one is one too
many. All members of a job can be on one host, or behind one address, and all claim at the same time: there is room for
them, however long this process takes to answer. A peer that is ended though it has a right to be here connects again.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.wire.limits import MAX_FRAME_BYTES, MAX_FRAMES

#: Bytes of the largest message before a claim: a ``Hello`` with names of 1,024 letters, and a ``Claim``, are smaller.
UNCLAIMED_BYTES = 8 * 1024

#: Messages before a claim that wait for this process: each holds up to ``UNCLAIMED_BYTES``.
UNCLAIMED_AHEAD = 4

#: Bytes that wait to be sent to a peer that has claimed nothing, unless it is one message alone.
UNCLAIMED_UNSENT_BYTES = 256 * 1024

#: Seconds between two messages before a claim. One that waits for the answer to its claim asks after it more often.
UNCLAIMED_S = 30.0

#: Connections of one host that have claimed nothing, beside those of members: of who asks for the status. Each has a
#: thread.
UNCLAIMED_SPARE = 64

#: More than any message can have.
UNBOUNDED = (MAX_FRAMES + 1) * MAX_FRAME_BYTES

#: Addresses of IPv6 that are one host's: it may choose any of such a network.
_IPV6_PREFIX = 64

Peer = TypeVar("Peer")


@dataclass(frozen=True)
class Bounds:
    """The bounds of a listener's peers."""

    of_a_host: int
    """Connections of one host that have claimed nothing."""
    largest: int = UNBOUNDED
    """Bytes of a message of a member."""

    @classmethod
    def of_job(cls, members: int, largest: int = UNBOUNDED) -> Bounds:
        """Return the bounds of a listener to which so many members connect, some anew before the last is closed."""
        return cls(UNCLAIMED_SPARE + 2 * members, largest)


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
        """Return the allowance of a peer that has not said who it is."""
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

    def refuses_size(self, size: int) -> str:
        """Return why a message is too large; empty: it is not."""
        if size <= self.message_bytes:
            return ""
        who = "of who has not said yet which member it is" if self.is_low else "of a member"
        return f"a message of {size} bytes; at most {self.message_bytes} {who} are taken here"

    def refuses_silence(self, silent_s: float) -> str:
        """Return why a peer has been silent for too long; empty: it has not."""
        if silent_s <= self.silence_s:
            return ""
        return f"it has not said which member it is, and sent no message for {self.silence_s:g} s"


class Claims(Generic[Peer]):
    """The identities that are members', and the connections that have claimed nothing. The caller holds a lock.

    Args:
        most: connections of one host that have claimed nothing.
    """

    def __init__(self, most: int) -> None:
        self._most = most
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
        if len(others) <= self._most:
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


def host_of(address: str) -> str:
    """Return what stands for the host of a socket's address: with IPv6 its network, of which it has all addresses."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.IPv6Network((found, _IPV6_PREFIX), strict=False))
    return str(found)
