"""The answering side: who may ask, each request carried out once, answers given again when they got lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import ProtocolError
from paceline.transport.base import Frames, Listener
from paceline.wire import Inbox, decode, encode
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

_MakeFrames = Callable[[], Frames]


@dataclass(frozen=True)
class _Result:
    body: m.Reply
    frames: _MakeFrames


def _no_frames() -> Frames:
    return ()


class Answerer:
    """Takes requests from a listener and gives answers.

    Args:
        listener: the transport.
        is_member: tells whether a peer has proved to be a member; only members are remembered.
    """

    def __init__(self, listener: Listener, is_member: Callable[[bytes], bool]) -> None:
        self._listener = listener
        self._is_member = is_member
        self._inboxes: dict[bytes, Inbox[_Result]] = {}
        self.refused = 0

    def take(self, peer: bytes, frames: Frames) -> tuple[int, m.Request, Frames] | None:
        """Read a message; returns (number, request, frames) when it is a new request."""
        try:
            envelope, payload = decode(frames)
            if not isinstance(envelope.body, m.Request):
                raise ProtocolError(f"{type(envelope.body).__name__} is not a request")
            if not self._is_member(peer):
                return self._from_stranger(peer, envelope, payload)
            if not self._is_new(peer, envelope):
                return None
        except (ProtocolError, ValueError) as error:
            self.refuse(peer, error)
            return None
        return envelope.seq, envelope.body, payload

    def _from_stranger(
        self, peer: bytes, envelope: m.Envelope, payload: Frames
    ) -> tuple[int, m.Request, Frames] | None:
        """Strangers are not remembered: whatever they ask about is unknown."""
        if isinstance(envelope.body, m.Probe):
            self._listener.send(peer, [encode(envelope.seq, 0, m.Unknown(envelope.body.seqs))])
            return None
        assert isinstance(envelope.body, m.Request)
        return envelope.seq, envelope.body, payload

    def _inbox(self, peer: bytes) -> Inbox[_Result]:
        """Return a member's inbox. New ones are rare: a good moment to forget who is no member any more."""
        if peer not in self._inboxes:
            self._inboxes = {one: inbox for one, inbox in self._inboxes.items() if self._is_member(one)}
            self._inboxes[peer] = Inbox()
        return self._inboxes[peer]

    def _is_new(self, peer: bytes, envelope: m.Envelope) -> bool:
        inbox = self._inbox(peer)
        if isinstance(envelope.body, m.Probe):
            self._look_after(peer, inbox, envelope.seq, envelope.body)
            return False
        if inbox.arrive(envelope.seq, envelope.acked):
            return True
        self._again(peer, inbox, envelope.seq)
        return False

    def _look_after(self, peer: bytes, inbox: Inbox[_Result], seq: int, probe: m.Probe) -> None:
        for asked in set(probe.seqs):
            self._again(peer, inbox, asked)
        unknown = [asked for asked in probe.seqs if not inbox.knows(asked)]
        self._listener.send(peer, [encode(seq, 0, m.Unknown(unknown))])

    def _again(self, peer: bytes, inbox: Inbox[_Result], seq: int) -> None:
        result = inbox.result(seq)
        if result is not None:
            self._listener.send(peer, [encode(seq, 0, result.body), *result.frames()])

    def refuse(self, peer: bytes, error: Exception) -> None:
        """Count a message that changes nothing."""
        self.refused += 1
        # Logged when the number reaches a power of two: the first at once, and never a flood.
        if self.refused & (self.refused - 1) == 0:
            logger.warning("refused a message of peer %r (%d refused so far): %s", peer, self.refused, error)

    def answer(
        self, peer: bytes, seq: int, body: m.Reply, frames: _MakeFrames = _no_frames, urgency: int | None = None
    ) -> None:
        """Answer a request, or send news with number 0.

        With an ``urgency`` it may overtake other answers with a higher one.
        The answer that makes a stranger a member is the first that is remembered: it can be given again.
        """
        if seq and self._is_member(peer):
            inbox = self._inbox(peer)
            if not inbox.knows(seq):
                inbox.arrive(seq, 0)
            inbox.finish(seq, _Result(body, frames))
        self._listener.send(peer, [encode(seq, 0, body), *frames()], urgency)
