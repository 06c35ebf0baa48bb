"""The answering side: takes each request once, and gives answers again that got lost.

A message of a peer, by its sender and its content:

| message | of a member | of a stranger |
|---|---|---|
| cannot be read, or is no request | counted; refused where its number can be read | counted, and not answered |
| has an impossible number | counted, and not answered | the same |
| a request that comes after one that was lost | is left: both come again | – |
| a request that is new | is returned to be carried out | the same |
| a request, while too much is kept for the member | is refused | – |
| a request that came before | its answer is sent again, if there is one | is returned again |
| a probe | answers that it asks after are sent again, and then the numbers that never arrived | nothing ever arrived |
| a probe while messages are under way to it | the numbers that never arrived | the same |

An open connection loses nothing. On a slow network an answer may be under way for longer than its asker waits before it
asks after it: sent again, it would take the time of the others. If it was lost, a later probe finds nothing under way.

Kept are the member's requests that wait, answers until it has them, and messages that wait to be sent to it. Their
headers have a bound, :data:`~paceline.wire.limits.MAX_KEPT_HEADS`, and with their payloads they have ``most_bytes``. A
correct member has a few requests of each kind under way, and stays far below. Strangers' connections have lower bounds:
:mod:`paceline.net.claims`.

A stranger becomes a member by a request (a claim, a hello), whose answer is the first that is remembered. So that
request may be carried out more than once, if messages get lost before it is answered.

The states of a request are in :mod:`paceline.wire.sequence`, the asking side in :mod:`paceline.net.call`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from paceline.errors import ProtocolError
from paceline.net.base import Damaged, Frames
from paceline.net.call import failed
from paceline.net.records import size_of
from paceline.net.sockets import SocketListener
from paceline.wire import FramingError, Inbox, Size, decode_request, encode
from paceline.wire import messages as m
from paceline.wire.limits import MAX_KEPT_HEADS

_MakeFrames = Callable[[], Frames]


class _Result(NamedTuple):
    body: m.Reply
    frames: _MakeFrames
    held: int
    """Microseconds from the request to the first answer."""


def _no_frames() -> Frames:
    return ()


def _size_of(frames: Frames) -> Size:
    return Size(size_of(frames[0]), sum(map(size_of, frames)))


class Answerer:
    """Takes requests that arrive at a listener, and sends answers. Used by the listener's thread.

    Args:
        listener: the listener.
        is_member: tells whether a peer is a member.
        clock: seconds; another one in tests.
        most_bytes: bytes that are kept for one member, with payloads.

    Attributes:
        damaged: counts messages that were refused.
    """

    def __init__(
        self,
        listener: SocketListener,
        is_member: Callable[[bytes], bool],
        clock: Callable[[], float] = time.monotonic,
        most_bytes: float = math.inf,
    ) -> None:
        self._listener, self._clock, self._most_bytes = listener, clock, most_bytes
        self._is_member = is_member
        self._inboxes: dict[bytes, Inbox[_Result]] = {}
        self.damaged = Damaged()

    def take(self, peer: bytes, frames: Frames) -> tuple[int, m.Request, Frames] | None:
        """Read a message; returns (number, request, frames) of a request to carry out, None of anything else."""
        try:
            envelope, payload = decode_request(frames)
            inbox = self._inboxes.get(peer)
            if inbox is None:
                inbox = self._new_inbox(peer)
            if inbox is None:
                return self._from_stranger(peer, envelope, payload)
            if isinstance(envelope.body, m.Probe):
                self._answer_probe(peer, inbox, envelope.seq, envelope.body)
                return None
            if not inbox.arrive(envelope.seq, envelope.acked, self._clock(), _size_of(frames)):
                self._again(peer, inbox, envelope.seq)
                return None
            if refusal := self._refusal(peer, inbox):
                self.damaged.note(f"peer {peer!r}", refusal)
                self.answer(peer, envelope.seq, failed(ProtocolError(refusal)))
                return None
        except (ProtocolError, ValueError) as error:
            self.damaged.note(f"peer {peer!r}", error)
            if isinstance(error, FramingError):
                self._refuse(peer, error)
            return None
        return envelope.seq, envelope.body, payload

    def _refusal(self, peer: bytes, inbox: Inbox[_Result]) -> str:
        """Return why no more is kept for a member; empty: there is room."""
        (heads, kept), unsent = inbox.kept, self._listener.unsent_bytes(peer)
        if heads <= MAX_KEPT_HEADS and kept + unsent <= self._most_bytes:
            return ""
        return (
            f"{len(inbox)} requests of this member wait, or have answers that it does not confirm, of {heads} bytes "
            f"without values and {kept} with them, and it leaves {unsent} bytes unread; at most {MAX_KEPT_HEADS} bytes "
            f"without values and {self._most_bytes:.0f} in all are kept for one member"
        )

    def _refuse(self, peer: bytes, error: FramingError) -> None:
        """Answer a member's message that cannot be read: sent again, it would be the same."""
        inbox = self._inboxes.get(peer)
        with contextlib.suppress(ValueError):  # impossible numbers
            if inbox is not None and inbox.arrive(error.seq, error.acked, self._clock()):
                self.answer(peer, error.seq, failed(ProtocolError(str(error))))

    def admit(self, peer: bytes) -> None:
        """Take from a peer what a member may send, if it has become one."""
        if peer not in self._inboxes:
            self._new_inbox(peer)

    def _from_stranger(
        self, peer: bytes, envelope: m.Envelope[m.Request], payload: Frames
    ) -> tuple[int, m.Request, Frames] | None:
        """Return a stranger's request. Strangers are not remembered: requests that they ask after never arrived."""
        if isinstance(envelope.body, m.Probe):
            self._listener.send(peer, [encode(envelope.seq, 0, m.Unknown(envelope.body.seqs))])
            return None
        return envelope.seq, envelope.body, payload

    def _new_inbox(self, peer: bytes) -> Inbox[_Result] | None:
        """Return the inbox of a new member; None: the peer is none."""
        if not self._is_member(peer):
            return None
        # New members are rare, so this is the moment to forget peers that are not members any more.
        for former in [one for one in self._inboxes if not self._is_member(one)]:
            del self._inboxes[former]
            self._listener.unclaimed(former)
        self._listener.claimed(peer)
        return self._inboxes.setdefault(peer, Inbox())

    def _answer_probe(self, peer: bytes, inbox: Inbox[_Result], seq: int, probe: m.Probe) -> None:
        if not self._listener.is_sending(peer):
            for asked in set(probe.seqs):
                self._again(peer, inbox, asked)
        unknown = [asked for asked in probe.seqs if not inbox.knows(asked)]
        self._listener.send(peer, [encode(seq, 0, m.Unknown(unknown))])

    def _again(self, peer: bytes, inbox: Inbox[_Result], seq: int) -> None:
        result = inbox.result(seq)
        if result is not None:
            self._listener.send(peer, [encode(seq, 0, result.body, result.held), *result.frames()])

    def answer(
        self, peer: bytes, seq: int, body: m.Reply, frames: _MakeFrames = _no_frames, urgency: int | None = None
    ) -> None:
        """Answer a request, or send news.

        Args:
            peer: the asker.
            seq: the number of the request; 0 for news.
            body: the answer.
            frames: makes the payload; called again when the answer is sent again.
            urgency: the answer may overtake those with a higher one.

        Raises:
            ValueError: no message can carry it. The request has no answer yet.
        """
        inbox = self._inboxes.get(peer)
        if inbox is None and seq:
            inbox = self._new_inbox(peer)
        held = 0
        if inbox is not None and seq:
            held = round(1e6 * inbox.held_s(seq, self._clock()))
        message = [encode(seq, 0, body, held), *frames()]
        if inbox is not None and seq:
            inbox.finish(seq, _Result(body, frames, held), _size_of(message))
        self._listener.send(peer, message, urgency)
