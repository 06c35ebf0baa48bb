"""Requests at their asker: numbered, kept until they are answered, and sent again when they were lost. Pure.

States of a request:

| state | event | next state |
|---|---|---|
| held: asked after a claim | the peer admits this process (:meth:`ChannelRequests.admit`) | sent |
| held | the peer does not (:meth:`ChannelRequests.turn_away`) | forgotten |
| sent | no answer for ``PROBE_AFTER_S``, or the connection was lost | probed: a ``Probe`` asks after it |
| probed | the peer says that it, or one before it, never arrived (``Unknown``) | sent, the same message again |
| probed | the peer has an answer and gives it again | answered |
| probed | neither: the peer works on it or sends it, or the probe was lost | probed again after ``PROBE_AFTER_S`` |
| sent, probed | the answer | answered, and forgotten |
| answered | the answer again | answered; the repeat is ignored |

The peer carries out requests in order, and leaves those behind one that was lost: they are all sent again. Probes have
numbers of their own.

Its call:

| event | the call |
|---|---|
| an answer | is done: ``body`` is set, ``on_answer`` has returned |
| an answer :class:`~paceline.wire.messages.Failed` | is done: ``error`` is rebuilt, ``on_failed`` has returned |
| a callback raises | is done: ``error`` is its exception |
| the peer refuses this process's key | is done, as all calls to that peer: ``error`` is an ``AuthenticationError`` |
| an answer whose number alone can be read | is done: ``error`` says why the rest cannot |
| a message of which nothing can be read | stays as it is: the message counts as lost, and the call is probed |
| an answer that comes again, or to no call | stays as it is |
| the deadline of a wait for it | stays as it is: its answer is used when it comes |

Errors travel as the name of a class, and a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TypeAlias

from paceline import errors
from paceline.errors import PacelineError, ProtocolError, RemoteError
from paceline.host.plain_text import plain, plain_lines, text_of
from paceline.net.base import Frames, check_memory
from paceline.wire import Outbox, encode
from paceline.wire import messages as m
from paceline.wire.limits import MAX_HEADER_BYTES, MAX_NAME

OnAnswer: TypeAlias = Callable[[m.Body, Frames], None]
OnFailed: TypeAlias = Callable[[m.Failed], None]

#: A request without an answer is asked after once in this time. Open connections lose nothing, so probes are rare.
PROBE_AFTER_S = 2.0

_BUILTIN: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError}


def failed(error: Exception) -> m.Failed:
    """Return the answer that tells a peer of an error."""
    return m.Failed(plain(type(error).__name__)[:MAX_NAME], text_of(error))


def rebuild(body: m.Failed, whom: str) -> Exception:
    """Return the exception that a peer's failure stands for. Other classes than ours become ``RemoteError``."""
    known, text = getattr(errors, body.kind, None), f"{whom}: {plain_lines(body.text)}"
    if isinstance(known, type) and issubclass(known, PacelineError):
        return known(text)
    return _BUILTIN.get(body.kind, RemoteError)(text)


class Call:
    """One request and its outcome.

    Args:
        whom: the peer, for messages: ``server 1 on 10.0.0.2``.
        what: the request, for messages: ``push of round 3``.
        request: the request itself.
        frames: its payload, unchanged until the answer.
        on_answer: called with the body and the frames of an answer that is not a failure.
        on_failed: called with a failure.

    Attributes:
        channel: index of the hub's channel; -1 until a client has the call.
        seq: the number of the request; 0 until it is sent.
        frames: the payload; empty when the call is done, so that the memory is free.
        done: the answer has come and the callback has returned.
        body: the answer, unless it is a failure.
        error: the peer's failure, or the callback's exception. The thread that waits for the call raises it.
        crashed: ``error`` was raised by a callback.
        asked: when it was sent first, in seconds on the client's clock.
        answered: when its answer came; 0: not yet.
        held_s: for how long the peer had the request, on the peer's clock.
    """

    __slots__ = (
        "_on_answer", "_on_failed", "answered", "asked", "body", "channel", "crashed", "done", "error", "frames",
        "held_s", "request", "seq", "what", "whom",
    )  # fmt: skip

    def __init__(
        self,
        whom: str,
        what: str,
        request: m.Request,
        frames: Frames = (),
        on_answer: OnAnswer | None = None,
        on_failed: OnFailed | None = None,
    ) -> None:
        self.whom, self.what, self.request, self.frames = whom, what, request, frames
        self.channel, self.seq = -1, 0
        self.asked = self.answered = self.held_s = 0.0
        self.done = self.crashed = False
        self.body: m.Body | None = None
        self.error: Exception | None = None
        self._on_answer, self._on_failed = on_answer, on_failed

    def complete(self, body: m.Body, frames: Frames) -> None:
        """Use the answer."""
        try:
            if frames:
                check_memory(frames, f"the answer of {self.whom} to {self.what}")
        except RemoteError as error:
            self.fail(error)
            return
        if isinstance(body, m.Failed):
            self.error = rebuild(body, self.whom)
            self._finish(self._on_failed, body)
        else:
            self.body = body
            self._finish(self._on_answer, body, frames)

    def fail(self, error: Exception) -> None:
        """End the call without an answer."""
        self.error = error
        self._finish(self._on_failed, failed(error))

    def _finish(self, callback: Callable[..., None] | None, *arguments: object) -> None:
        self.frames = ()
        try:
            if callback is not None:
                callback(*arguments)
        except PacelineError as error:
            self._crash(type(error)(f"{self.what} at {self.whom}: {error}"))
        except Exception as error:  # noqa: BLE001 - thread border: the thread that waits for the call raises it
            self._crash(error)
        except BaseException as error:
            # Thread border: KeyboardInterrupt belongs to this thread. A thread that waits for the call learns that
            # data may be incomplete.
            self._crash(PacelineError(f"{self.what} at {self.whom}: {type(error).__name__} while its answer was used"))
            raise
        finally:
            # They refer to objects that keep the call, so memory would wait for a garbage collection.
            self._on_answer = self._on_failed = None
            self.done = True

    def _crash(self, error: Exception) -> None:
        self.error, self.crashed = error, True

    def raise_error(self) -> None:
        """Raise the error of the call, once."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def way_of(calls: Iterable[Call], began: float) -> float:
    """Return for how much of a wait the last answer of some calls was on the way, or its request.

    The wait was for that one. An answer that was here before the wait tells nothing about the way.
    """
    last = max(calls, key=attrgetter("answered"), default=None)
    if last is None:
        return 0.0
    return max(0.0, min(last.answered - began, last.answered - last.asked - last.held_s))


class ChannelRequests(Outbox[Call]):
    """The calls over one channel of a hub: numbers their requests, and keeps each until it is answered. Pure.

    Methods return the messages to be sent, in order. The caller owns the lock, the clock and the transport.
    """

    def __init__(self, channel: int, name: str) -> None:
        super().__init__()
        self.channel, self.name = channel, name
        self.connections = 0
        """How often the channel was connected anew."""
        self._held: list[Call] | None = None
        """Requests that wait until the peer has admitted this process; None: nothing waits any more."""
        self._probes = self._repeated = 0
        """Probes so far, and those of them that were sent before requests were sent again last."""

    def ask(self, call: Call, now: float) -> list[Frames]:
        """Take a request. A claim holds back later requests.

        Raises:
            Exception: it cannot be encoded, and is forgotten.
        """
        if self._held is not None:
            self._held.append(call)
            return []
        call.channel, call.seq, call.asked = self.channel, self._next, now
        message = self._message(call)
        self.add(call, now)
        if isinstance(call.request, m.Claim):
            self._held = []
        return [message]

    def _message(self, call: Call) -> Frames:
        head = encode(call.seq, self.acked, call.request)
        if len(head) > MAX_HEADER_BYTES:
            raise ProtocolError(
                f"{call.what} needs a message of {len(head)} bytes without values; {self.name} takes at most "
                f"{MAX_HEADER_BYTES}"
            )
        return [head, *call.frames]

    def admit(self, now: float) -> list[Frames]:
        """Send the requests that were held back, and hold back nothing more."""
        held, self._held = self._held or [], None
        return [message for call in held for message in self.ask(call, now)]

    def turn_away(self) -> list[Call]:
        """Forget the requests that were held back, and hold back nothing more; returns the calls."""
        held, self._held = self._held or [], None
        return held

    def again(self, probe: int, unknown: Sequence[int]) -> list[Frames]:
        """Send again the requests that have never arrived, as the answer to a probe says, and all later ones.

        An answer to a probe that was sent before they were sent again tells nothing new.
        """
        if not unknown or probe <= self._repeated:
            return []
        self._repeated = self._probes
        return list(map(self._message, self.since(min(unknown))))

    def probe(self, now: float, at_once: bool = False) -> list[Frames]:
        """Ask after requests whose answer is overdue; after all of them ``at_once`` when the connection was lost."""
        late = self.overdue(now, 0.0 if at_once else PROBE_AFTER_S)
        if not late:
            return []
        self._probes += 1
        return [[encode(self._probes, 0, m.Probe(late))]]

    def drop(self) -> list[Call]:
        """Forget all requests, because the peer will answer none; returns their calls."""
        return super().drop() + self.turn_away()
