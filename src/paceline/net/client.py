"""The asking side of a process: calls over the connections of one hub, from any number of threads.

States of a call are those of its request (:mod:`paceline.net.requests`) and then:

| event | the call |
|---|---|
| an answer | is done: ``body`` is set, ``on_answer`` has returned |
| an answer :class:`~paceline.wire.messages.Failed` | is done: ``error`` is rebuilt, ``on_failed`` has returned |
| a callback raises | is done: ``error`` is what it raised |
| the peer refuses this process's key | is done, as all calls to that peer: ``error`` is an ``AuthenticationError`` |
| a message that cannot be read | stays as it is: the message counts as lost, and the call is probed |
| an answer that comes again, or to no call | stays as it is |
| the deadline of a wait for it | stays as it is: its answer is used when it comes |

Callbacks run in the thread that drives the hub (:mod:`paceline.net.shared_hub`), one at a time, in the order in which
answers arrive.

Times. What stands left must be shorter than what stands right, by a few times where it can be:

| time | shorter than | because |
|---|---|---|
| ``CHECK_INTERVAL_S`` | ``PROBE_AFTER_S`` | overdue requests are found only at a check |
| ``PROBE_AFTER_S`` | ``heartbeat_timeout_s`` | a lost heartbeat is repaired before silence counts as death |
| ``heartbeat_interval_s`` | ``heartbeat_timeout_s`` | one late heartbeat is no death |
| 1 s, within which a hub connects again | ``disconnect_grace_s`` | a connection that blinks is no death |
| ``stall_timeout_s``, ``disconnect_grace_s`` | ``timeout_s`` | a death is reported as a death, not as a deadline |
| the longest step of the slowest worker | ``timeout_s`` | the answer to a push may wait for all workers |
| the scheduler's ``start_timeout_s`` | a member's, which adds 5 s | only the scheduler knows who is missing |

What breaks exactly-once is listed in :mod:`paceline.wire.sequence`. In particular the frames of a request must stay
unchanged until it is answered: they are not copied, and may be sent again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from paceline.errors import AuthenticationError, ProtocolError, RemoteError
from paceline.net import Hub
from paceline.net.base import Frames, check_memory
from paceline.net.call import Call, OnAnswer, OnFailed
from paceline.net.damaged import Damaged
from paceline.net.requests import ChannelRequests, identity
from paceline.net.shared_hub import SharedHub
from paceline.wire import decode
from paceline.wire import messages as m

#: Check interval for overdue answers, refused keys and the failure of the job. Messages wake a wait at once.
CHECK_INTERVAL_S = 0.5

logger = logging.getLogger(__name__)


class Client:
    """Asks peers and takes their answers. Used by any thread, except :meth:`connect`.

    Args:
        hub: the transport; the client's own.
        on_news: called with messages that nobody asked for, as callbacks of calls are.
        check: called again and again by every wait; raises when there is nothing to wait for any more.
        clock: seconds; another one in tests.

    Attributes:
        damaged: counts messages that could not be read.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        on_news: Callable[[m.Body], None] = lambda body: None,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub, self._on_news, self._check, self._clock = hub, on_news, check, clock
        self._shared = SharedHub(hub, self._use)
        self._connections: list[ChannelRequests] = []
        """By channel. The mutex of the shared hub guards what each holds."""
        self._next_check = 0.0
        self.damaged = Damaged()

    def __len__(self) -> int:
        """Return how many requests are sent and not answered, probes included."""
        with self._shared.mutex:
            return sum(map(len, self._connections))

    def connect(self, address: str, role: str, peer: str, where: str = "", *, bulk: bool = False) -> int:
        """Open a connection; returns its channel. No other thread may use the client meanwhile.

        Args:
            address: where the peer listens.
            role: of this process.
            peer: role and rank of the peer, as in ``server 1``; nobody else is talked to.
            where: it is, for messages: ``on 10.0.0.2``.
            bulk: it carries tensors.
        """
        name = f"{peer} {where}".strip()
        logger.info("connecting to %s at %s", name, address)
        channel = self._hub.connect(address, identity(role), peer, bulk=bulk)
        self._connections.append(ChannelRequests(channel, name))
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
        """Send a request, and do not wait. What one peer is asked arrives there in the order of asking.

        Args:
            channel: to whom.
            body: the request.
            what: the request, for messages: ``push of round 3``.
            frames: payload; unchanged until the answer.
            on_answer: called with an answer that is no failure. It may ask, but not wait.
            on_failed: called with a failure; the call's error tells it too.

        Raises:
            PacelineError: the client is closed.
        """
        connection = self._connections[channel]
        logger.debug("to %s: %s (%s)", connection.name, what, type(body).__name__)
        call = Call(connection.name, what, on_answer, on_failed)
        call.channel = channel
        self._shared.post(lambda: connection.ask(call, body, frames, self._clock()))
        return call

    def claim(self, channel: int, claim: m.Claim) -> Call:
        """Say who this process is. What is asked there later is held back until the peer has admitted it.

        If the peer refuses, calls that were held back fail as the claim does.
        """
        connection = self._connections[channel]

        def admitted(body: m.Body, frames: Frames) -> None:
            self._shared.post(lambda: connection.admit(self._clock()))

        def turned_away(body: m.Failed) -> None:
            with self._shared.mutex:
                calls = connection.turn_away()
            for call in calls:
                call.complete(body, ())

        return self.ask(channel, claim, "joining", (), admitted, turned_away)

    def request(self, call: Call) -> m.Request | None:
        """Return what a call has asked, as long as it is sent and not answered."""
        with self._shared.mutex:
            return self._connections[call.channel].request(call.seq)

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, calls: Iterable[Call], timeout_s: float) -> Call | None:
        """Wait until calls are done.

        Returns:
            A call that was not answered in time; None when all are done.

        Raises:
            PacelineError: the client was closed.
            Exception: what ``check`` raised, or the first error of the calls.
        """
        calls = list(calls)
        pending = [call for call in calls if not call.done]
        deadline = self._clock() + timeout_s
        while pending:
            remaining = deadline - self._clock()
            if remaining <= 0:
                return pending[0]
            self._check()
            self._shared.turn(min(remaining, CHECK_INTERVAL_S), lambda: all(call.done for call in calls))
            pending = [call for call in pending if not call.done]
        for call in calls:
            call.raise_error()
        return None

    def poll(self, timeout_s: float = 0.0) -> None:
        """Use what has arrived, after waiting at most ``timeout_s`` for the first message.

        Raises:
            PacelineError: the client is closed.
            Exception: what a callback raised, since nobody may wait for its call; of several, the first.
        """
        for error in self._shared.turn(timeout_s):
            raise error

    def wake(self) -> None:
        """Have waiting threads call ``check`` now."""
        self._shared.wake()

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connections, after waiting at most ``linger_s`` for what is still to be sent. Idempotent."""
        self._shared.close(linger_s)

    # ---- what arrives; all of this runs in the thread that drives ----------------------------------------------------

    def _use(self, arrived: list[tuple[int, Frames]]) -> list[Exception]:
        raised = [error for channel, frames in arrived if (error := self._use_one(channel, frames)) is not None]
        now = self._clock()
        is_due = now >= self._next_check
        if is_due or not arrived:
            for channel in self._hub.reopened():
                self._probe(self._connections[channel], now, at_once=True)
        if is_due:
            self._next_check = now + CHECK_INTERVAL_S
            for connection in self._connections:
                if len(connection):
                    self._look_after(connection, now)
        return raised

    def _use_one(self, channel: int, frames: Frames) -> Exception | None:
        """Use a message; returns what a callback raised."""
        connection = self._connections[channel]
        try:
            envelope, payload = decode(frames)
        except ProtocolError as error:
            self.damaged.note(connection.name, error)
            return None
        body = envelope.body
        logger.debug("from %s: %s", connection.name, type(body).__name__)
        if isinstance(body, m.Unknown):
            self._shared.post(lambda: connection.again(envelope.seq, body.seqs))
        elif envelope.seq == 0:
            return self._use_news(body)
        else:
            with self._shared.mutex:
                call = connection.answer(envelope.seq)
            if call is not None:
                self._complete(call, body, payload)
                return call.error if call.crashed else None
        return None

    def _complete(self, call: Call, body: m.Body, payload: Frames) -> None:
        try:
            check_memory(payload, f"the answer of {call.whom} to {call.what}")
        except RemoteError as error:
            call.fail(error)
        else:
            call.complete(body, payload)

    def _use_news(self, body: m.Body) -> Exception | None:
        try:
            self._on_news(body)
        except Exception as error:  # noqa: BLE001 - thread border: poll() raises it in the owner's thread
            return error
        return None

    def _probe(self, connection: ChannelRequests, now: float, at_once: bool = False) -> None:
        self._shared.post(lambda: connection.probe(now, at_once))

    def _look_after(self, connection: ChannelRequests, now: float) -> None:
        reason = self._hub.refused(connection.channel)
        if not reason:
            self._probe(connection, now)
            return
        with self._shared.mutex:
            calls = connection.drop()
        for call in calls:
            call.fail(
                AuthenticationError(
                    f"{connection.name} refuses this process: {reason}. Start it with the job's own PACELINE_JOB_KEY "
                    "(paceline launch sets it), and PACELINE_INSECURE equal everywhere"
                )
            )
