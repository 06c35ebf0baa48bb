"""Simulates a bad network and slow processes. A job under test must give the same results with them.

Faults act where messages are received. A message may be late, so that those of other peers overtake it. It may arrive
twice, the second time much later. It may be lost, until it is probed. Apart from that, messages of one peer keep their
order, as the transport promises. Processes pause before they use arrived messages and before they send, and servers
pause before they update.

Production code does not depend on this: :mod:`paceline.testing.faulty` replaces the ends of the transport by faulty
ones, in the processes of a job that was started with ``LocalJob(faults=...)``.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import os
import random
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.net.base import Frames, Hub, Listener
from paceline.net.handshake import HandshakeError
from paceline.net.sockets import SocketListener

#: Environment variable with the faults of a process, as JSON.
VARIABLE = "PACELINE_TESTING_FAULTS"

#: A repeat is at most this many times later than any first message.
_REPEAT_LATER = 4

Peer = TypeVar("Peer", bound=Hashable)


@dataclass(frozen=True)
class Faults:
    """Kinds of faults and their rates.

    Attributes:
        seed: seed of the random numbers; every process has its own sequence, the same in every run.
        delay_s: longest delay of a message.
        repeat: share of the messages that arrive twice.
        lose: share of the messages that get lost, on connections that carry tensors.
        pause_s: longest pause of a process.
        pause: share of the possible pauses that are made.
        probe_after_s: replaces ``PROBE_AFTER_S`` and the check intervals, which are longer.
    """

    seed: int = 0
    delay_s: float = 0.001
    repeat: float = 0.05
    lose: float = 0.003
    pause_s: float = 0.001
    pause: float = 0.2
    probe_after_s: float = 0.03

    def to_json(self) -> str:
        """Return the text for the environment."""
        return json.dumps(dataclasses.asdict(self))


class Chance:
    """The random numbers of one process.

    Args:
        faults: their rates.
        who: the process, which gets a sequence of its own.
        sleep: makes a pause.
    """

    def __init__(self, faults: Faults, who: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self.faults = faults
        self._random = random.Random(f"{faults.seed} {who}")
        self._sleep = sleep

    def has(self, share: float) -> bool:
        """Return True with this probability."""
        return self._random.random() < share

    def delay_s(self) -> float:
        """Return the delay of a message."""
        return self._random.uniform(0.0, self.faults.delay_s)

    def pause(self) -> None:
        """Pause, or not."""
        if self.has(self.faults.pause):
            self._sleep(self._random.uniform(0.0, self.faults.pause_s))


class DelayedMessages(Generic[Peer]):
    """Messages that have arrived and are delayed.

    Args:
        chance: decides what happens to each.
    """

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._heap: list[tuple[float, int, Peer, Frames]] = []
        self._latest: dict[Peer, float] = {}
        self._count = 0

    def add(self, messages: Iterable[tuple[Peer, Frames]], now: float, may_lose: Callable[[Peer], bool]) -> None:
        """Add messages that have arrived."""
        faults = self._chance.faults
        for peer, frames in messages:
            if may_lose(peer) and self._chance.has(faults.lose):
                continue
            due = max(self._latest.get(peer, 0.0), now + self._chance.delay_s())
            self._latest[peer] = due
            self._put(due, peer, frames)
            if self._chance.has(faults.repeat):
                self._put(due + _REPEAT_LATER * self._chance.delay_s(), peer, frames)

    def _put(self, due: float, peer: Peer, frames: Frames) -> None:
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, peer, frames))

    def take(self, now: float) -> list[tuple[Peer, Frames]]:
        """Return the messages whose delay has passed."""
        taken = []
        while self._heap and self._heap[0][0] <= now:
            _, _, peer, frames = heapq.heappop(self._heap)
            taken.append((peer, frames))
        return taken

    def wait_s(self, now: float, timeout_s: float) -> float:
        """Return how long to wait at most until the next message is due."""
        return min(timeout_s, max(0.0, self._heap[0][0] - now)) if self._heap else timeout_s


class FaultyHub:
    """A hub whose answers arrive late, twice or never.

    Args:
        inner: the transport's.
        chance: random numbers of this process.
    """

    def __init__(self, inner: Hub, chance: Chance) -> None:
        self.inner = inner
        self.held: DelayedMessages[int] = DelayedMessages(chance)
        self._chance = chance
        self._bulk: set[int] = set()

    def connect(self, address: str, identity: bytes, listener: str, *, bulk: bool = False) -> int:
        """Open a channel; returns its index. Only what carries tensors loses messages."""
        channel = self.inner.connect(address, identity, listener, bulk=bulk)
        if bulk:
            self._bulk.add(channel)
        return channel

    def send(self, channel: int, frames: Frames) -> None:
        """Send on a channel, perhaps after a pause."""
        if channel in self._bulk:
            self._chance.pause()
        self.inner.send(channel, frames)

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        """Return the arrived messages that are due."""
        arrived = self.inner.receive(self.held.wait_s(time.monotonic(), timeout_s))
        now = time.monotonic()
        self.held.add(arrived, now, self._bulk.__contains__)
        return self.held.take(now)

    def is_open(self, channel: int) -> bool:
        """Return whether the channel is connected now."""
        return self.inner.is_open(channel)

    def host_silent_s(self, channel: int) -> float | None:
        """Return the seconds since the kernel of the listener's host was heard; None where that is not known."""
        return self.inner.host_silent_s(channel)

    def is_deserted(self, channel: int) -> bool:
        """Return whether the kernel of the listener's host says that the listener is gone."""
        return self.inner.is_deserted(channel)

    def reopened(self) -> list[int]:
        """Return channels that have closed and connected again since the last call."""
        return self.inner.reopened()

    def refused(self, channel: int) -> HandshakeError | None:
        """Return why the listener refuses this process, if it does."""
        return self.inner.refused(channel)

    def wake(self) -> None:
        """Make ``receive`` return now."""
        self.inner.wake()

    def close(self, linger_s: float = 0.0) -> None:
        """Close all channels."""
        self.inner.close(linger_s)


class FaultyListener:
    """A listener whose requests arrive late, twice or never.

    Args:
        inner: the transport's.
        chance: random numbers of this process.
    """

    def __init__(self, inner: Listener, chance: Chance) -> None:
        self.inner = inner
        self._chance = chance
        self._held: DelayedMessages[bytes] = DelayedMessages(chance)
        self._hubs: list[FaultyHub] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where peers can connect."""
        return self.inner.addresses

    def serve_as(self, name: str) -> None:
        """Let peers in that mean this process."""
        assert isinstance(self.inner, SocketListener)
        self.inner.serve_as(name)

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """Return the arrived messages that are due, perhaps after a pause."""
        now = time.monotonic()
        for hub in self._hubs:
            timeout_s = hub.held.wait_s(now, timeout_s)
        arrived = self.inner.receive(self._held.wait_s(now, timeout_s))
        now = time.monotonic()
        self._held.add(arrived, now, lambda peer: True)
        taken = self._held.take(now)
        if taken:
            self._chance.pause()
        return taken

    def send(self, peer: bytes, frames: Frames, urgency: int | None = None) -> None:
        """Send to a peer."""
        self.inner.send(peer, frames, urgency)

    def is_sending(self, peer: bytes) -> bool:
        """Return whether messages to a peer are under way."""
        return self.inner.is_sending(peer)

    def lost(self) -> list[bytes]:
        """Return peers whose connection has closed since the last call."""
        return self.inner.lost()

    def host_silent_s(self, peer: bytes) -> float | None:
        """Return the seconds since the kernel of the peer's host was heard; None where that is not known."""
        return self.inner.host_silent_s(peer)

    def watch_hub(self, hub: FaultyHub) -> None:
        """Make ``receive`` return also when something is due at a hub of the same thread."""
        self._hubs.append(hub)
        self.inner.watch_hub(hub.inner)

    def wake(self) -> None:
        """Make ``receive`` return now."""
        self.inner.wake()

    def close(self, linger_s: float = 0.0) -> None:
        """Close."""
        self.inner.close(linger_s)


def asked_for() -> Faults | None:
    """Return the faults that this process was started with."""
    text = os.environ.get(VARIABLE, "")
    return Faults(**json.loads(text)) if text else None
