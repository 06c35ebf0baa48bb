"""One hub for many threads, without a lock that is held while the hub waits.

A hub belongs to one thread at a time. The thread that may use it is the *driver*: it sends what all threads have
posted, receives, and hands over what has arrived. There is at most one.

| a thread | finds no driver | finds another driver |
|---|---|---|
| posts | queues the messages, drives until the queue is empty | queues them and wakes the driver, which sends them |
| waits | drives for one receive, then looks whether it is done | *follows*: sleeps until it is done or nobody drives |
| closes | drives for ever, so that nobody else does | wakes the driver, and drives for ever after it |

The mutex guards the queue and the right to drive. It is held for table look-ups only: not while the hub sends or
receives, and not while messages are used. So a thread that posts never waits for one that waits.

A message is never forgotten in the queue: the right to drive is given back under the mutex, and only when the queue is
empty. A driver that was woken sends before it receives again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

from paceline.errors import PacelineError
from paceline.net import Hub
from paceline.net.base import Frames
from paceline.net.requests import PostedRequest

logger = logging.getLogger(__name__)

#: Uses what has arrived, as (channel, frames), also when that is nothing; returns what callbacks have raised.
Use: TypeAlias = Callable[[list[tuple[int, Frames]]], list[Exception]]

#: Bound of the wait of :meth:`SharedHub.close` for a driver. It stops when it has used what has arrived.
CLOSE_TIMEOUT_S = 5.0


class SharedHub:
    """Lets threads send through a hub and wait for what arrives there.

    Args:
        hub: the transport; from now on used by drivers only, except to connect.
        use: called by the driver after every receive.

    Attributes:
        mutex: guards also what ``post`` reads and writes. Held for moments only.
    """

    def __init__(self, hub: Hub, use: Use) -> None:
        self._hub, self._use = hub, use
        self.mutex = threading.Lock()
        self._changed = threading.Condition(self.mutex)
        """Notified when nobody drives any more."""
        self._followers = 0
        self._driver: int | None = None
        """The thread that drives."""
        self._in_use = False
        """The driver uses what has arrived."""
        self._queue: list[PostedRequest] = []
        """What the driver is to send, in order."""
        self._closed = False

    def post(self, make: Callable[[], Iterable[PostedRequest]]) -> None:
        """Send messages, which another thread may do a moment later.

        Args:
            make: called under the mutex, so that messages are sent in the order in which they are made.

        Raises:
            PacelineError: the hub is closed.
        """
        with self.mutex:
            self._check_open()
            self._queue += make()
            if not self._may_drive():
                if self._driver != threading.get_ident():
                    self._hub.wake()  # under the mutex: close() must not free what this uses
                return
            batch = self._start_driving()
        self._drive(batch, None)

    def turn(self, timeout_s: float, is_done: Callable[[], bool] = lambda: False) -> list[Exception]:
        """Drive for one receive, or follow the thread that drives.

        Args:
            timeout_s: bound of the wait.
            is_done: tells whether there is nothing to wait for any more; called under the mutex.

        Returns:
            What ``use`` returned if this thread drove.

        Raises:
            PacelineError: the hub is closed.
        """
        with self.mutex:
            self._check_open()
            if is_done():
                return []  # another thread drove since the caller looked
            if not self._may_drive():
                self._follow(timeout_s, is_done)
                return []
            batch = self._start_driving()
        return self._drive(batch, timeout_s)

    def _follow(self, timeout_s: float, is_done: Callable[[], bool]) -> None:
        if self._driver == threading.get_ident():
            raise RuntimeError("a callback of an answer must not wait: its own thread takes the answers")
        self._wait_for(lambda: self._driver is None or self._closed or is_done(), timeout_s)

    def _wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        self._followers += 1
        try:
            return self._changed.wait_for(predicate, timeout_s)
        finally:
            self._followers -= 1

    def _check_open(self) -> None:
        if self._closed:
            raise PacelineError("the connections of this process are closed; nothing can be asked any more")

    def wake(self) -> None:
        """Have the driver return from its turn now; then a follower drives."""
        with self.mutex:
            if not self._closed:
                self._hub.wake()

    def close(self, linger_s: float = 0.0) -> None:
        """Close the hub, after the thread that drives has stopped. Waiting threads raise. Idempotent."""
        with self.mutex:
            if self._closed:
                return
            self._closed = True
            if not self._may_drive():
                self._hub.wake()
                if not self._wait_for(lambda: self._driver is None, CLOSE_TIMEOUT_S):
                    logger.warning("connections stay open: a thread has used answers for %g s", CLOSE_TIMEOUT_S)
                    return
            batch = self._start_driving()
        self._send(batch)
        self._hub.close(linger_s)

    # ---- driving ---------------------------------------------------------------------------------------------------

    def _may_drive(self) -> bool:
        """Return whether this thread may become the driver now. The caller holds the mutex."""
        # A thread that drives, and is not in a callback, was interrupted by a signal before it could stop.
        return self._driver is None or (self._driver == threading.get_ident() and not self._in_use)

    def _start_driving(self) -> list[PostedRequest]:
        """Become the driver; returns what is to be sent first. The caller holds the mutex."""
        self._driver = threading.get_ident()
        batch, self._queue = self._queue, []
        return batch

    def _drive(self, batch: list[PostedRequest], timeout_s: float | None) -> list[Exception]:
        """Send, receive once if there is a timeout, and stop driving; returns what ``use`` returned."""
        try:
            self._send(batch)
            return [] if timeout_s is None else self._receive(timeout_s)
        finally:
            self._finish()

    def _receive(self, timeout_s: float) -> list[Exception]:
        arrived = self._hub.receive(timeout_s)
        self._in_use = True
        try:
            return self._use(arrived)
        finally:
            self._in_use = False

    def _send(self, batch: Iterable[PostedRequest]) -> None:
        for message in batch:
            self._hub.send(message.channel, message.encoded())

    def _finish(self) -> None:
        """Send what was posted meanwhile, and stop driving."""
        try:
            while batch := self._next_or_stop():
                self._send(batch)
        except BaseException:
            # Thread border: whatever ends the work of this thread (KeyboardInterrupt too), another one can drive.
            with self.mutex:
                self._stop_driving()
            raise

    def _next_or_stop(self) -> list[PostedRequest]:
        with self.mutex:
            batch, self._queue = self._queue, []
            if not batch:
                self._stop_driving()
            return batch

    def _stop_driving(self) -> None:
        self._driver = None
        if self._followers:
            self._changed.notify_all()
