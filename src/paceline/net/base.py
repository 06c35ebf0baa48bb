"""The interface of a transport: a hub asks many listeners, a listener answers many hubs.

A transport promises this, and no more:

- A message arrives whole or not at all.
- Messages of one channel arrive in the order of sending, but for answers with an ``urgency``.
- An open connection loses no message. Messages on their way when it closes may be lost, and are not repeated.

:mod:`paceline.net.call` makes exactly-once requests of that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from paceline.errors import RemoteError

if TYPE_CHECKING:
    from paceline.net.handshake import HandshakeError  # takes cryptography, which launchers do without

logger = logging.getLogger(__name__)

#: Header and payload buffers of one message.
Frames: TypeAlias = Sequence[Any]


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


class Listener(Protocol):
    """The end to which many peers connect. Used by one thread, except :meth:`wake`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where peers can connect."""

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """Return messages as (peer, frames), after waiting at most ``timeout_s`` for the first."""

    def send(self, peer: bytes, frames: Frames, urgency: int | None = None) -> None:
        """Send to a peer; dropped without a word when its connection is closed.

        Args:
            peer: the receiver.
            frames: large ones are not copied, so they must stay unchanged.
            urgency: the message may overtake those to the same peer that wait with a higher number.
        """

    def is_sending(self, peer: bytes) -> bool:
        """Return whether messages to a peer are under way: they wait here, or its kernel does not have them yet."""

    def lost(self) -> list[bytes]:
        """Return peers whose connection has closed since the last call."""

    def host_silent_s(self, peer: bytes) -> float | None:
        """Return the seconds since the kernel of the peer's host was heard; None where that is not known."""

    def watch_hub(self, hub: Any) -> None:
        """Make ``receive`` return also when something arrives at a hub. Both are used by the same thread."""

    def wake(self) -> None:
        """Make ``receive`` return now, or the next one if none waits. From any thread."""

    def close(self, linger_s: float = 0.0) -> None:
        """Close, after waiting at most ``linger_s`` for messages to be sent."""


class Hub(Protocol):
    """The end that connects to listeners. One thread at a time sends, and one at a time receives; any thread wakes."""

    def connect(self, address: str, identity: bytes, listener: str, *, bulk: bool = False) -> int:
        """Open a channel; returns its index, counted from 0.

        Args:
            address: address of the listener.
            identity: the listener's name for this peer.
            listener: role and rank of the listener, as in ``server 1``; the channel opens to no other.
            bulk: the channel carries tensors.
        """

    def send(self, channel: int, frames: Frames) -> None:
        """Send on a channel. Large frames are not copied, so they must stay unchanged until the answer."""

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        """Return messages as (channel, frames), after waiting at most ``timeout_s`` for the first."""

    def is_open(self, channel: int) -> bool:
        """Return whether the channel is connected now."""

    def host_silent_s(self, channel: int) -> float | None:
        """Return the seconds since the kernel of the listener's host was heard; None where that is not known."""

    def is_deserted(self, channel: int) -> bool:
        """Return whether the kernel of the listener's host says that no process listens there any more."""

    def reopened(self) -> list[int]:
        """Return channels that have closed and connected again since the last call. Messages may be lost."""

    def refused(self, channel: int) -> HandshakeError | None:
        """Return why the listener refuses this process, if it does."""

    def wake(self) -> None:
        """Make ``receive`` return now, or the next one if none waits. From any thread."""

    def close(self, linger_s: float = 0.0) -> None:
        """Close all channels, after waiting at most ``linger_s`` for messages to be sent."""
