"""The asking side of one connection: numbers requests, keeps each until it is answered, sends lost ones again. Pure.

States of a request:

| state | event | next state |
|---|---|---|
| held: asked after a claim | the peer admits this process (:meth:`ChannelRequests.admit`) | sent |
| held | the peer does not (:meth:`ChannelRequests.turn_away`) | forgotten |
| sent | no answer for ``PROBE_AFTER_S``, or the connection was lost | probed: a ``Probe`` asks after it |
| probed | the peer says that it never arrived (``Unknown``) | sent, the same message again |
| probed | the peer has an answer and gives it again | answered |
| probed | neither, since the peer still works on it, or the probe was lost | probed again after ``PROBE_AFTER_S`` |
| sent, probed | the answer | answered, and forgotten |
| answered | the answer again | answered; the repeat is ignored |

Requests are numbered in the order in which they are asked, and messages leave in the order in which methods return
them. The caller owns the lock, the clock and the transport. The answering side is
:class:`~paceline.net.answerer.Answerer`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from paceline.net.base import Frames
from paceline.net.call import Call
from paceline.wire import Outbox, encode
from paceline.wire import messages as m

#: A request without an answer is asked after once in this time. Open connections lose nothing, so probes are rare.
PROBE_AFTER_S = 2.0


def identity(role: str) -> bytes:
    """Return a new name for a connection, that no other connection has."""
    return f"{role}-{os.getpid()}-{secrets.token_hex(8)}".encode()


class PostedRequest(NamedTuple):
    """A request on its way to the hub."""

    channel: int
    seq: int
    acked: int
    body: m.Request
    frames: Frames

    def encoded(self) -> Frames:
        """Return the header and the payload."""
        return [encode(self.seq, self.acked, self.body), *self.frames]


class _Asked(NamedTuple):
    """A request as it was asked; a probe has no call."""

    call: Call | None
    body: m.Request
    frames: Frames


class ChannelRequests:
    """The requests over one channel of a hub.

    Args:
        channel: of the hub.
        name: the peer, for messages: ``server 1 on 10.0.0.2``.
    """

    def __init__(self, channel: int, name: str) -> None:
        self.channel, self.name = channel, name
        self._outbox: Outbox[_Asked] = Outbox()
        self._held: list[_Asked] | None = None
        """Requests that wait until the peer has admitted this process; None: nothing waits any more."""

    def __len__(self) -> int:
        """Return how many requests are sent and not answered, probes included."""
        return len(self._outbox)

    def ask(self, call: Call, body: m.Request, frames: Frames, now: float) -> list[PostedRequest]:
        """Take a request; returns what is to be sent. A claim holds back what is asked after it."""
        asked = _Asked(call, body, frames)
        if self._held is not None:
            self._held.append(asked)
            return []
        if isinstance(body, m.Claim):
            self._held = []
        return [self._number(asked, now)]

    def _number(self, asked: _Asked, now: float) -> PostedRequest:
        seq = self._outbox.add(asked, now)
        if asked.call is not None:
            asked.call.seq = seq
        return PostedRequest(self.channel, seq, self._outbox.acked, asked.body, asked.frames)

    def admit(self, now: float) -> list[PostedRequest]:
        """Send what was held back, and hold back nothing more."""
        held, self._held = self._held or [], None
        return [self._number(asked, now) for asked in held]

    def turn_away(self) -> list[Call]:
        """Forget what was held back, and hold back nothing more; returns the calls."""
        held, self._held = self._held or [], None
        return [asked.call for asked in held if asked.call is not None]

    def answer(self, seq: int) -> Call | None:
        """Note an answer; returns the call, or None when it is a repeat or nobody asked."""
        asked = self._outbox.content(seq)
        self._outbox.answer(seq)
        return None if asked is None else asked.call

    def again(self, probe: int, seqs: Sequence[int]) -> list[PostedRequest]:
        """Send again what has never arrived, as the answer to a probe says."""
        self._outbox.answer(probe)
        found = [(seq, self._outbox.content(seq)) for seq in seqs]
        acked = self._outbox.acked
        return [PostedRequest(self.channel, seq, acked, one.body, one.frames) for seq, one in found if one is not None]

    def probe(self, now: float, at_once: bool = False) -> list[PostedRequest]:
        """Ask after requests whose answer is overdue; after all of them ``at_once`` when the connection was lost."""
        late = []
        for seq in self._outbox.overdue(now, 0.0 if at_once else PROBE_AFTER_S):
            asked = self._outbox.content(seq)
            if asked is not None and asked.call is None:
                self._outbox.answer(seq)  # a lost probe is replaced by a new one
            else:
                late.append(seq)
        return [self._number(_Asked(None, m.Probe(late), ()), now)] if late else []

    def drop(self) -> list[Call]:
        """Forget all requests, because the peer will answer none; returns their calls."""
        unanswered = [asked.call for asked in self._outbox.drop() if asked.call is not None]
        return unanswered + self.turn_away()

    def request(self, seq: int) -> m.Request | None:
        """Return a request that is not answered yet."""
        asked = self._outbox.content(seq)
        return None if asked is None else asked.body
