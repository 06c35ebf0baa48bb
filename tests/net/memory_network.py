"""A transport inside one process, for tests, with faults on demand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

from paceline.net.base import Frames

#: What happens to a message. A judge is called once per message, in order.
Fault = Literal["deliver", "drop", "repeat", "late"]
Judge = Callable[[], Fault]


def always_deliver() -> Fault:
    """Deliver every message."""
    return "deliver"


class MemoryNetwork:
    """Connects hubs and listeners by address.

    Args:
        judge: decides what happens to each message. A ``late`` one is overtaken by the next.
    """

    def __init__(self, judge: Judge = always_deliver) -> None:
        self.changed = threading.Condition()
        self.judge = judge
        self.listeners: dict[str, MemoryListener] = {}

    def put(
        self,
        queue: deque[tuple[bytes | int, Frames]],
        held: list[tuple[bytes | int, Frames]],
        item: tuple[bytes | int, Frames],
    ) -> None:
        """Put a message into a queue, as the judge says."""
        # A copy: as on a real network, a message does not change when the sender's memory does.
        item = (item[0], [bytes(frame) for frame in item[1]])
        with self.changed:
            fault = self.judge()
            if fault == "late":
                held.append(item)
                return
            if fault != "drop":
                queue.extend([item] * (2 if fault == "repeat" else 1))
            queue.extend(held)
            held.clear()
            self.changed.notify_all()


class MemoryListener:
    """The listening end."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self.addresses = (address,)
        self.queue: deque[tuple[bytes | int, Frames]] = deque()
        self.held: list[tuple[bytes | int, Frames]] = []
        self.peers: dict[bytes, tuple[MemoryHub, int]] = {}
        self._hubs: list[MemoryHub] = []
        self._woken = False
        network.listeners[address] = self

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """Return the arrived messages as (peer, frames)."""
        with self._network.changed:
            self._network.changed.wait_for(
                lambda: self.queue or self._woken or any(hub.queue for hub in self._hubs), timeout_s
            )
            self._woken = False
            messages = [(bytes(peer), [bytearray(f) for f in frames]) for peer, frames in self.queue]
            self.queue.clear()
            return messages  # type: ignore[return-value]

    def send(self, peer: bytes, frames: Frames, urgency: int | None = None) -> None:
        """Send to a peer. No message waits here, so none is overtaken."""
        if peer in self.peers:
            hub, channel = self.peers[peer]
            self._network.put(hub.queue, hub.held, (channel, frames))

    def claimed(self, identity: bytes) -> None:
        """Do nothing: here a peer may send what it likes."""

    def unclaimed(self, identity: bytes) -> None:
        """Do nothing: connections never close in memory."""

    def unsent_bytes(self, peer: bytes) -> int:
        """Return 0: messages take no time."""
        return 0

    def is_sending(self, peer: bytes) -> bool:
        """Return False: messages take no time."""
        return False

    def lost(self) -> list[bytes]:
        """Return nothing: connections never close in memory."""
        return []

    def host_silent_s(self, peer: bytes) -> float | None:
        """Return 0: there is one host."""
        return 0.0

    def watch_hub(self, hub: MemoryHub) -> None:
        """Make ``receive`` return also when something arrives at a hub."""
        self._hubs.append(hub)

    def wake(self) -> None:
        """Make ``receive`` return now."""
        with self._network.changed:
            self._woken = True
            self._network.changed.notify_all()

    def close(self, linger_s: float = 0.0) -> None:
        """Close: messages to this address are dropped from now on."""
        self._network.listeners.pop(self.addresses[0], None)


class MemoryHub:
    """The connecting end."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._targets: list[tuple[str, bytes]] = []
        self.queue: deque[tuple[bytes | int, Frames]] = deque()
        self.held: list[tuple[bytes | int, Frames]] = []
        self._woken = False

    def connect(self, address: str, identity: bytes, listener: str, *, bulk: bool = False) -> int:
        """Open a channel; returns its index."""
        self._targets.append((address, identity))
        return len(self._targets) - 1

    def send(self, channel: int, frames: Frames) -> None:
        """Send on a channel."""
        address, identity = self._targets[channel]
        listener = self._network.listeners.get(address)
        if listener is not None:
            listener.peers[identity] = (self, channel)
            self._network.put(listener.queue, listener.held, (identity, frames))

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        """Return the arrived messages as (channel, frames)."""
        with self._network.changed:
            self._network.changed.wait_for(lambda: self.queue or self._woken, timeout_s)
            self._woken = False
            messages = list(self.queue)
            self.queue.clear()
            return messages  # type: ignore[return-value]

    def is_open(self, channel: int) -> bool:
        """Return whether there is a listener at the address."""
        return self._targets[channel][0] in self._network.listeners

    def host_silent_s(self, channel: int) -> float | None:
        """Return 0: there is one host."""
        return 0.0

    def is_deserted(self, channel: int) -> bool:
        """Return False: there is no kernel."""
        return False

    def reopened(self) -> list[int]:
        """Return nothing: connections never close in memory, only messages get lost."""
        return []

    def refused(self, channel: int) -> None:
        """Return nothing: no peer is refused in memory."""

    def wake(self) -> None:
        """Make ``receive`` return now."""
        with self._network.changed:
            self._woken = True
            self._network.changed.notify_all()

    def close(self, linger_s: float = 0.0) -> None:
        """Close all channels."""
        self._targets = [("", b"")] * len(self._targets)
