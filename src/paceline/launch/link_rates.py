"""How much the connections between hosts carry: ``python -m paceline.launch.link_rates``, one worker on each host.

The bytes travel as a job's do: over its sockets, sealed with a key that all workers get (:data:`KEY_VARIABLE`).
Worker 0 says which pair of hosts is measured next, so that no two pairs disturb each other, and prints each one's rate.

| to worker 0 | meaning |
|---|---|
| ``["here", address]`` | a worker listens there |
| ``["carried", bytes_per_s, round_trip_s]`` | the rate of the pair that worker 0 has named last |

| from worker 0 | meaning |
|---|---|
| ``["measure", worker, address]`` | send to that worker, then let it send |
| ``["end"]`` | exit |

| between two workers | meaning |
|---|---|
| ``["take"]`` and bytes | answered by ``["took"]`` |
| ``["give", size]`` | answered by ``["took"]`` and so many bytes |
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.config import from_environment
from paceline.errors import DeadlineError
from paceline.host.interfaces import address_of, address_towards, tcp
from paceline.net.base import Frames
from paceline.net.security import Security
from paceline.net.sockets import SocketHub, SocketListener

#: The variable with the key of the connections.
KEY_VARIABLE = "LINK_RATES_KEY"

#: Begins each line of worker 0 about a pair.
MARK = "paceline-link "

#: How long each direction of a pair is measured, and the part of it at the beginning that does not count: switches
#: let some bytes pass at once.
MEASURE_S, SETTLING_S = 0.6, 0.2

#: Messages that are under way at once, their size, and their size where a link is so fast that they are too small.
_WINDOW, _BYTES, _LARGE_BYTES, _FAST_BYTES_S = 4, 64 * 1024, 1 << 20, 50e6

#: Pairs that are measured at most, as long as each host is in two of them.
MOST_PAIRS = 28

#: How long to wait for a message of another worker.
_PATIENCE_S = 30.0

Links = Mapping[tuple[int, int], tuple[float, float]]
"""By pair of workers: bytes per second of its slower direction, and seconds of a round trip."""


def parse_links(text: str) -> Links:
    """Return the pairs in what worker 0 printed; other lines do not count."""
    lines = (line.partition(MARK)[2] for line in text.splitlines())
    found = [json.loads(line) for line in lines if line]
    return {(int(one), int(other)): (float(rate), float(trip)) for one, other, rate, trip in found}


def pairs(count: int) -> list[tuple[int, int]]:
    """Return the pairs to measure: all, or of many hosts each one with its next ones around a circle."""
    steps = range(1, count // 2 + 1)
    around = ((one, (one + step) % count) for step in steps for one in range(count))
    found = dict.fromkeys((min(pair), max(pair)) for pair in around)
    return sorted(list(found)[: max(MOST_PAIRS, count)])


def steady_rate(marks: list[tuple[float, int]]) -> float:
    """Return bytes per second after the settling time, from seconds since the beginning and bytes that had arrived."""
    settled = [mark for mark in marks if mark[0] >= SETTLING_S] or marks[-1:]
    (begin, before), (end, after) = settled[0], settled[-1]
    if end <= begin:  # one message took all the time
        return after / end
    return (after - before) / (end - begin)


class LinkRates:
    """A worker that listens at an address; the ``leader`` is that of worker 0, which all others know."""

    def __init__(self, rank: int, count: int, key: str, listen_at: str, leader: str) -> None:
        self._rank, self._count = rank, count
        self._hub = SocketHub(Security(key))
        self._listener = SocketListener([listen_at], Security(key), _name(rank), bulk=True)
        self._said: queue.SimpleQueue[tuple[int, list[Any]]] = queue.SimpleQueue()
        self._arrived: list[list[Any]] = []
        self._over = threading.Event()
        self._server = threading.Thread(target=self._serve)
        self._server.start()
        self._leader = self._hub.connect(leader, str(rank).encode(), _name(0)) if rank else -1

    def run(self) -> Iterator[tuple[int, int, float, float]]:
        """Measure what worker 0 says. Worker 0 yields all pairs with rate and round trip, the others nothing.

        Raises:
            DeadlineError: another worker does not answer.
        """
        try:
            if self._rank == 0:
                yield from self._lead()
                return
            self._hub.send(self._leader, _frames("here", self._listener.addresses[0]))
            while (order := self._answer())[0] == "measure":
                self._hub.send(self._leader, _frames("carried", *self._measure(order[1], order[2])))
        finally:
            self._over.set()
            self._hub.close(1.0)
            self._server.join()
            self._listener.close(1.0)

    def _lead(self) -> Iterator[tuple[int, int, float, float]]:
        addresses = {rank: words[1] for rank, words in (self._next_said() for _ in range(1, self._count))}
        for one, other in pairs(self._count):
            if one:
                self._listener.send(str(one).encode(), _frames("measure", other, addresses[other]))
                _, rate, trip = self._next_said()[1]
            else:
                rate, trip = self._measure(other, addresses[other])
            yield one, other, rate, trip
        for rank in range(1, self._count):
            self._listener.send(str(rank).encode(), _frames("end"))

    def _next_said(self) -> tuple[int, list[Any]]:
        try:
            return self._said.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise DeadlineError(f"a host said nothing for {_PATIENCE_S:g} s while links were measured") from None

    def _measure(self, worker: int, address: str) -> tuple[float, float]:
        """Return bytes per second of the slower direction to another worker, and seconds of a round trip."""
        channel = self._hub.connect(address, f"{self._rank}-{worker}".encode(), _name(worker), bulk=True)
        trip = statistics.median(self._trip_s(channel) for _ in range(5))
        buffers = {size: bytes(size) for size in (_BYTES, _LARGE_BYTES)}
        out = self._carry(channel, lambda size: (*_frames("take"), buffers[size]))
        return min(out, self._carry(channel, lambda size: _frames("give", size))), trip

    def _trip_s(self, channel: int) -> float:
        began = time.monotonic()
        self._hub.send(channel, _frames("take"))
        self._answer()
        return time.monotonic() - began

    def _carry(self, channel: int, message: Callable[[int], Frames]) -> float:
        """Return the rate of messages of which some are under way at any time."""
        began, size, under_way, arrived = time.monotonic(), _BYTES, list[int](), 0
        marks: list[tuple[float, int]] = []
        while not marks or marks[-1][0] < MEASURE_S:
            while len(under_way) < _WINDOW:
                self._hub.send(channel, message(size))
                under_way.append(size)
            self._answer()
            arrived += under_way.pop(0)
            marks.append((time.monotonic() - began, arrived))
            if arrived > _FAST_BYTES_S * marks[-1][0]:
                size = _LARGE_BYTES
        for _ in under_way:
            self._answer()
        return steady_rate(marks)

    def _answer(self) -> list[Any]:
        """Return the next message from a listener; one is asked at a time."""
        until = time.monotonic() + _PATIENCE_S
        while not self._arrived and time.monotonic() < until:
            self._arrived += [_words(frames) for _, frames in self._hub.receive(1.0)]
        if self._arrived:
            return self._arrived.pop(0)
        raise DeadlineError(f"worker {self._rank} got no answer for {_PATIENCE_S:g} s while links were measured")

    def _serve(self) -> None:
        """Answer other workers until the end."""
        while not self._over.is_set():
            for peer, frames in self._listener.receive(0.2):
                words = _words(frames)
                if words[0] == "take":
                    self._listener.send(peer, _frames("took"))
                elif words[0] == "give":
                    self._listener.send(peer, (*_frames("took"), bytes(words[1])))
                else:
                    self._said.put((int(peer), words))


def _frames(*words: Any) -> Frames:
    return (json.dumps(words).encode(),)


def _words(frames: Frames) -> list[Any]:
    words: list[Any] = json.loads(bytes(frames[0]))
    return words


def _name(rank: int) -> str:
    return f"server {rank}"


def main() -> None:
    """Be the worker that the environment describes."""
    settings, environ = from_environment(), os.environ
    leader = tcp(environ["MASTER_ADDR"], environ["MASTER_PORT"])
    here = address_of(settings.interface) if settings.interface else address_towards([environ["MASTER_ADDR"]])
    rank, count = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    own = tcp(here, settings.ports or "*") if rank else leader
    for found in LinkRates(rank, count, environ[KEY_VARIABLE], own, leader).run():
        print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
