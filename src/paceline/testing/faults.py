"""Simulates a bad network and slow processes. A job under test must give the same results with them.

Faults act where messages are received. A message may be late, so that messages of other peers overtake it. It may
arrive twice, the second time much later. It may be lost, until it is probed. Apart from that, messages of one peer keep
their order, as the transport promises. Processes pause before they use arrived messages and before they send, and
servers pause before they update.

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
from typing import Any, Generic, TypeVar

from paceline.net.base import Frames
from paceline.net.security import Security
from paceline.net.sockets import SocketHub, SocketListener

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
    """The random numbers of one process."""

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
    """Messages that have arrived and are delayed."""

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


class FaultyHub(SocketHub):
    """A hub whose answers arrive late, twice or never. Only channels that carry tensors lose messages."""

    def __init__(self, security: Security, chance: Chance) -> None:
        super().__init__(security)
        self.held: DelayedMessages[int] = DelayedMessages(chance)
        self._chance = chance
        self._bulk: set[int] = set()

    def connect(self, address: str, identity: bytes, listener: str, *, bulk: bool = False) -> int:
        """Open a channel; returns its index."""
        channel = super().connect(address, identity, listener, bulk=bulk)
        if bulk:
            self._bulk.add(channel)
        return channel

    def send(self, channel: int, frames: Frames) -> None:
        """Send on a channel, perhaps after a pause."""
        if channel in self._bulk:
            self._chance.pause()
        super().send(channel, frames)

    def receive(self, timeout_s: float) -> list[tuple[int, Frames]]:
        """Return the arrived messages that are due."""
        arrived = super().receive(self.held.wait_s(time.monotonic(), timeout_s))
        now = time.monotonic()
        self.held.add(arrived, now, self._bulk.__contains__)
        return self.held.take(now)


class FaultyListener(SocketListener):
    """A listener whose requests arrive late, twice or never."""

    def __init__(self, chance: Chance, *arguments: Any, **options: Any) -> None:
        self._chance = chance
        self._held: DelayedMessages[bytes] = DelayedMessages(chance)
        self._hubs: list[FaultyHub] = []
        super().__init__(*arguments, **options)

    def receive(self, timeout_s: float) -> list[tuple[bytes, Frames]]:
        """Return the arrived messages that are due, perhaps after a pause."""
        now = time.monotonic()
        for hub in self._hubs:
            timeout_s = hub.held.wait_s(now, timeout_s)
        arrived = super().receive(self._held.wait_s(now, timeout_s))
        now = time.monotonic()
        self._held.add(arrived, now, lambda peer: True)
        taken = self._held.take(now)
        if taken:
            self._chance.pause()
        return taken

    def watch_hub(self, hub: SocketHub) -> None:
        """Make ``receive`` return also when something is due at a hub of the same thread."""
        assert isinstance(hub, FaultyHub)
        self._hubs.append(hub)
        super().watch_hub(hub)


def asked_for() -> Faults | None:
    """Return the faults that this process was started with."""
    text = os.environ.get(VARIABLE, "")
    return Faults(**json.loads(text)) if text else None
