"""What waits in an inbox is never forgotten."""

from __future__ import annotations

import queue
import time

from paceline.net.connection import BURST, BURST_BYTES, ReceivedQueue

LONG_S = 30.0


def put(inbox: ReceivedQueue[int], source: int, size: int) -> None:
    inbox.put(source, [b""], size, queue.SimpleQueue())


def take_all(inbox: ReceivedQueue[int], timeout_s: float = 0.0) -> list[int]:
    return [source for source, _ in inbox.receive(timeout_s)]


def test_a_watcher_is_woken_again_for_large_messages_that_were_left() -> None:
    own, watched = ReceivedQueue[int](), ReceivedQueue[int]()
    watched.add_watcher(own)
    for source in range(3):
        put(watched, source, BURST_BYTES // 2 + 1)
    assert take_all(own, LONG_S) == []
    assert take_all(watched) == [0, 1]
    began = time.monotonic()
    assert take_all(own, LONG_S) == []
    assert time.monotonic() - began < LONG_S / 2
    assert take_all(watched) == [2]


def test_a_watcher_is_woken_again_for_many_messages_that_were_left() -> None:
    own, watched = ReceivedQueue[int](), ReceivedQueue[int]()
    watched.add_watcher(own)
    for source in range(BURST + 1):
        put(watched, source, 1)
    take_all(own, LONG_S)
    assert len(take_all(watched)) == BURST
    began = time.monotonic()
    take_all(own, LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    assert take_all(watched) == [BURST]


def test_a_watcher_sleeps_when_nothing_is_left() -> None:
    own, watched = ReceivedQueue[int](), ReceivedQueue[int]()
    watched.add_watcher(own)
    put(watched, 1, 1)
    take_all(own, LONG_S)
    assert take_all(watched) == [1]
    began = time.monotonic()
    assert take_all(own, 0.2) == []
    assert time.monotonic() - began >= 0.2
