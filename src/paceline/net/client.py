"""The asking side of a process: calls over the connections of one hub, from any number of threads.

The states of a request and of its call are tables in :mod:`paceline.net.call`.

Threads. Any thread sends: numbering and sending happen under one mutex, so messages leave in the order of their
numbers. One thread at a time receives, the *driver*: it runs the callbacks of all calls, one at a time, in the order in
which answers arrive. The mutex is not held while it waits or while callbacks run.

| a thread that waits | finds no driver | finds another driver |
|---|---|---|
| waits | drives for one receive, then looks whether it is done | *follows*: sleeps until it is done or none drives |
| closes | drives for ever, so that no other does | wakes the driver, and drives for ever after it |

Times. The left one must be shorter than the right one, by a few times where it can be:

| time | shorter than | because |
|---|---|---|
| ``CHECK_INTERVAL_S`` | ``PROBE_AFTER_S`` | overdue requests are found only at a check |
| ``PROBE_AFTER_S`` | ``heartbeat_timeout_s`` | a lost heartbeat is repaired before silence counts as death |
| ``beat_interval_s`` | ``heartbeat_timeout_s`` | one late heartbeat is no death |
| 1 s, within which a hub connects again | ``disconnect_grace_s`` | a connection that blinks is no death |
| ``stall_timeout_s``, ``disconnect_grace_s`` | ``timeout_s`` | a death is reported as a death, not as a deadline |
| the longest step of the slowest worker | ``timeout_s`` | the answer to a push may wait for all workers |
| the scheduler's ``start_timeout_s`` | a member's, which adds 5 s | only the scheduler knows who is missing |

What breaks exactly-once is listed in :mod:`paceline.wire.sequence`. In particular the frames of a request must stay
unchanged until it is answered: they are not copied, and may be sent again. The answering side is
:class:`~paceline.net.answerer.Answerer`.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from paceline.errors import PacelineError, ProtocolError
from paceline.net.base import Damaged, Frames
from paceline.net.call import Call, ChannelRequests, OnAnswer, OnFailed
from paceline.net.sockets import SocketHub
from paceline.observe import events, ring
from paceline.wire import FramingError, decode
from paceline.wire import messages as m

#: Check interval for overdue answers, refused keys and the failure of the job. Messages wake a wait at once.
CHECK_INTERVAL_S = 0.5

#: Bound of the wait of :meth:`Client.close` for a driver. It stops when it has used the messages that have arrived.
CLOSE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


def identity(role: str) -> bytes:
    """Return a new name for a connection, that no other connection has."""
    return f"{role}-{os.getpid()}-{secrets.token_hex(8)}".encode()


class Client:
    """Asks peers and takes their answers. Used by any thread, except :meth:`connect`.

    Args:
        hub: the transport; the client's own.
        on_news: called with messages that no call asked for, as callbacks of calls are.
        check: called again and again by every wait; raises when there is nothing to wait for any more.
        clock: seconds; another one in tests.

    Attributes:
        damaged: counts messages that could not be read.
    """

    def __init__(
        self,
        hub: SocketHub,
        *,
        on_news: Callable[[m.Body], None] = lambda body: None,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub, self._on_news, self._check, self._clock = hub, on_news, check, clock
        self._channels: list[ChannelRequests] = []
        self._members: list[int] = []
        """By channel the number that stands for the peer in events."""
        self._mutex = threading.Lock()
        """Guards the channels, the order in which messages leave, and the right to drive."""
        self._changed = threading.Condition(self._mutex)
        """Notified when no thread drives any more."""
        self._followers = 0
        self._driver: int | None = None
        """The thread that drives."""
        self._in_use = False
        """The driver uses messages that have arrived."""
        self._closed = False
        self._next_check = 0.0
        self.damaged = Damaged()

    def __len__(self) -> int:
        """Return how many requests are sent and not answered."""
        with self._mutex:
            return sum(map(len, self._channels))

    def connect(self, address: str, role: str, peer: str, where: str = "", *, bulk: bool = False) -> int:
        """Open a connection; returns its channel. No other thread may use the client meanwhile.

        Args:
            address: address of the peer's listener.
            role: role of this process.
            peer: role and rank of the peer, as in ``server 1``; the channel opens to no other.
            where: place of the peer, for messages: ``on 10.0.0.2``.
            bulk: it carries tensors.
        """
        name = f"{peer} {where}".strip()
        logger.info("connecting to %s at %s", name, address)
        channel = self._hub.connect(address, identity(role), peer, bulk=bulk)
        self._channels.append(ChannelRequests(channel, name))
        asked, _, rank = peer.partition(" ")
        self._members.append(events.member(asked, int(rank or 0)) if asked in events.ROLES else 0)
        return channel

    # ---- asking ----------------------------------------------------------------------------------------------------

    def ask(
        self,
        channel: int,
        body: m.Request,
        what: str,
        frames: Frames = (),
        on_answer: OnAnswer | None = None,
        on_failed: OnFailed | None = None,
    ) -> Call:
        """Send a request, and do not wait. Requests to one peer arrive there in the order of asking.

        Args:
            channel: index of the receiver's channel.
            body: the request.
            what: the request, for messages: ``push of round 3``.
            frames: payload; unchanged until the answer.
            on_answer: called with an answer that is no failure. It may ask, but not wait.
            on_failed: called with a failure; the call's error tells it too.

        Raises:
            PacelineError: the client is closed.
        """
        requests = self._channels[channel]
        logger.debug("to %s: %s (%s)", requests.name, what, type(body).__name__)
        call = Call(requests.name, what, body, frames, on_answer, on_failed)
        with self._mutex:
            self._check_open()
            messages = requests.ask(call, self._clock())
            if not isinstance(body, m.Heartbeat):
                ring.note(events.SENT, call.seq, self._members[channel], m.TAGS[type(body)])
            for message in messages:
                self._hub.send(channel, message)
        return call

    def _send(self, requests: ChannelRequests, make: Callable[[], Iterable[Frames]]) -> None:
        """Send messages that are made under the mutex."""
        with self._mutex:
            self._check_open()
            for message in make():
                self._hub.send(requests.channel, message)

    def claim(self, channel: int, claim: m.Claim) -> Call:
        """Say who this process is. Later requests to that peer are held back until it has admitted this process.

        If the peer refuses, calls that were held back fail as the claim does.
        """
        requests = self._channels[channel]

        def admitted(body: m.Body, frames: Frames) -> None:
            self._send(requests, lambda: requests.admit(self._clock()))

        def turned_away(body: m.Failed) -> None:
            with self._mutex:
                calls = requests.turn_away()
            for call in calls:
                call.complete(body, ())

        return self.ask(channel, claim, "joining", (), admitted, turned_away)

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, calls: Iterable[Call], timeout_s: float) -> Call | None:
        """Wait until calls are done.

        Returns:
            A call that was not answered in time; None when all are done.

        Raises:
            PacelineError: the client was closed.
            Exception: that of ``check``, or the first error of the calls.
        """
        calls = list(calls)
        deadline = self._clock() + timeout_s
        for call in calls:
            while not call.done:
                remaining = deadline - self._clock()
                self._check()
                # After the deadline, too: it may have passed while this process did not run, and the answer is here.
                self._turn(max(0.0, min(remaining, CHECK_INTERVAL_S)), call)
                if remaining <= 0 and not call.done:
                    return call
        for call in calls:
            call.raise_error()
        return None

    def connections(self, channel: int) -> int:
        """Return how often a channel was connected anew."""
        return self._channels[channel].connections

    def poll(self, timeout_s: float = 0.0) -> None:
        """Use the messages that have arrived, after waiting at most ``timeout_s`` for the first message.

        Raises:
            PacelineError: the client is closed.
            Exception: that of a callback, since perhaps no thread waits for its call; of several, the first.
        """
        for error in self._turn(timeout_s):
            raise error

    def _turn(self, timeout_s: float, call: Call | None = None) -> list[Exception]:
        """Drive for one receive, or follow the thread that drives, until a call is done.

        Returns:
            Exceptions that callbacks have raised, if this thread drove.

        Raises:
            PacelineError: the client is closed.
        """
        with self._mutex:
            self._check_open()
            if call is not None and call.done:
                return []  # another thread drove since the caller looked
            if not self._may_drive():
                self._follow(timeout_s, call)
                return []
            self._driver = threading.get_ident()
        try:
            arrived = self._hub.receive(timeout_s)
            self._in_use = True
            try:
                return self._use(arrived)
            finally:
                self._in_use = False
        finally:
            # Thread border: whatever ends the work of this thread (KeyboardInterrupt too), another one can drive.
            with self._mutex:
                self._driver = None
                if self._followers:
                    self._changed.notify_all()

    def _may_drive(self) -> bool:
        """Return whether this thread may become the driver now. The caller holds the mutex."""
        # A thread that drives, and is not in a callback, was interrupted by a signal before it could stop.
        return self._driver is None or (self._driver == threading.get_ident() and not self._in_use)

    def _follow(self, timeout_s: float, call: Call | None) -> None:
        if self._driver == threading.get_ident():
            raise RuntimeError("a callback of an answer must not wait: its own thread takes the answers")
        self._sleep(lambda: self._driver is None or self._closed or (call is not None and call.done), timeout_s)

    def _sleep(self, until: Callable[[], bool], timeout_s: float) -> bool:
        self._followers += 1
        try:
            return self._changed.wait_for(until, timeout_s)
        finally:
            self._followers -= 1

    def _check_open(self) -> None:
        if self._closed:
            raise PacelineError("the connections of this process are closed; nothing can be asked any more")

    def wake(self) -> None:
        """Have waiting threads call ``check`` now."""
        with self._mutex:
            if not self._closed:
                self._hub.wake()

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connections, after waiting at most ``linger_s`` for messages to be sent. Idempotent.

        Waiting threads raise. The thread that drives stops first.
        """
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            if not self._may_drive():
                self._hub.wake()
                if not self._sleep(lambda: self._driver is None, CLOSE_TIMEOUT_S):
                    logger.warning("connections stay open: a thread has used answers for %g s", CLOSE_TIMEOUT_S)
                    return
            self._driver = threading.get_ident()
        self._hub.close(linger_s)

    # ---- messages that arrive; all of this runs in the thread that drives -------------------------------------------

    def _use(self, arrived: Sequence[tuple[int, Frames]]) -> list[Exception]:
        raised: list[Exception] = []
        for channel, frames in arrived:
            error = self._use_one(channel, frames)
            if error is not None:
                raised.append(error)
        now = self._clock()
        is_due = now >= self._next_check
        if is_due or not arrived:
            for channel in self._hub.reopened():
                requests = self._channels[channel]
                requests.connections += 1
                self._send(requests, partial(requests.probe, now, at_once=True))
        if is_due:
            self._next_check = now + CHECK_INTERVAL_S
            for requests in self._channels:
                if len(requests):
                    self._look_after(requests, now)
        return raised

    def _use_one(self, channel: int, frames: Frames) -> Exception | None:
        """Use a message; returns the exception of a callback."""
        requests = self._channels[channel]
        try:
            envelope, payload = decode(frames)
        except FramingError as error:
            self.damaged.note(requests.name, error)
            with self._mutex:
                call = requests.answer(error.seq)
            if call is not None:
                call.fail(ProtocolError(f"the answer of {call.whom} to {call.what} cannot be read: {error}"))
            return None
        body = envelope.body
        logger.debug("from %s: %s", requests.name, type(body).__name__)
        if isinstance(body, m.Unknown):
            self._send(requests, lambda: requests.again(envelope.seq, body.seqs))
            return None
        if envelope.seq == 0:
            return self._use_news(body)
        with self._mutex:
            call = requests.answer(envelope.seq)
        if call is None:
            return None
        if not isinstance(body, m.News):
            ring.note(events.GOT, envelope.seq, self._members[channel], m.TAGS[type(body)])
        call.answered, call.held_s = self._clock(), 1e-6 * envelope.held
        call.complete(body, payload)
        return call.error if call.crashed else None

    def _use_news(self, body: m.Body) -> Exception | None:
        try:
            self._on_news(body)
        except Exception as error:  # noqa: BLE001 - thread border: poll() raises it in the owner's thread
            return error
        return None

    def _look_after(self, requests: ChannelRequests, now: float) -> None:
        refusal = self._hub.refused(requests.channel)
        if refusal is None:
            self._send(requests, lambda: requests.probe(now))
            return
        with self._mutex:
            calls = requests.drop()
        for call in calls:
            call.fail(refusal.for_caller(requests.name))
