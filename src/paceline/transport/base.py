"""The two ends of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

#: Header and payload buffers of one message.
Frames: TypeAlias = Sequence[Any]


class Listener(Protocol):
    """The end that many peers talk to. Used by one thread, except :meth:`wake`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where peers can connect."""

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """Return what has arrived as (peer, frames), after waiting at most ``timeout_s`` for the first."""

    def send(self, peer: bytes, frames: Frames, urgency: int | None = None) -> None:
        """Send to a peer; silently dropped when it is gone. Large frames are not copied: leave them unchanged.

        With an ``urgency`` it may overtake what still waits to be sent to that peer with a higher number.
        """

    def lost(self) -> list[bytes]:
        """Return peers whose connection has closed since the last call."""

    def watch_hub(self, hub: Any) -> None:
        """Make ``receive`` return also when something arrives at a hub of the same transport and thread."""

    def wake(self) -> None:
        """Make ``receive`` return now. From any thread."""

    def close(self, linger_s: float = 0.0) -> None:
        """Close, after waiting at most ``linger_s`` for what is still to be sent."""


class Hub(Protocol):
    """The end that talks to several listeners. Used by one thread at a time, except :meth:`wake`."""

    def connect(self, address: str, identity: bytes, *, bulk: bool = False) -> int:
        """Open a channel; returns its index. The identity is what the listener calls this peer;
        ``bulk`` channels carry tensors.
        """

    def send(self, channel: int, frames: Frames) -> None:
        """Send on a channel. Large frames are not copied: leave them unchanged until the answer."""

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        """Return what has arrived as (channel, frames), after waiting at most ``timeout_s`` for the first."""

    def is_open(self, channel: int) -> bool:
        """Tell whether the channel is connected now."""

    def reopened(self) -> list[int]:
        """Return channels that were connected anew since the last call: what was under way may be lost."""

    def refused(self, channel: int) -> str:
        """Return why the other side refuses this process, or an empty string."""

    def wake(self) -> None:
        """Make ``receive`` return now. From any thread."""

    def close(self, linger_s: float = 0.0) -> None:
        """Close all channels."""
