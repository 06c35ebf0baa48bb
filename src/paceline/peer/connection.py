"""The asking side of one connection: numbered requests, kept until answered, asked after when news is overdue."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.transport.base import Frames, Hub
from paceline.wire import Outbox, decode, encode
from paceline.wire import messages as m

#: A request without an answer for this long is asked after; connections that live lose nothing, so this is rare.
PROBE_AFTER_S = 2.0


@dataclass(frozen=True)
class Sent:
    """A request as it was sent, for sending it again."""

    body: m.Request
    frames: Frames


class Connection:
    """Requests over one channel of a hub.

    Args:
        hub: the transport.
        channel: which of its channels.
        name: the peer, for messages: ``server 1 on 10.0.0.2``.
    """

    def __init__(self, hub: Hub, channel: int, name: str) -> None:
        self.hub, self.channel, self.name = hub, channel, name
        self._outbox: Outbox[Sent] = Outbox()

    def __len__(self) -> int:
        return len(self._outbox)

    def send(self, body: m.Request, frames: Frames, now: float) -> int:
        """Send a request; returns its number."""
        seq = self._outbox.add(Sent(body, frames), now)
        self.hub.send(self.channel, [encode(seq, min(self._outbox.acked, seq - 1), body), *frames])
        return seq

    def take(self, frames: Frames) -> tuple[int, m.Body, Frames] | None:
        """Read what came back; returns (number, body, frames) of a first answer or of news, None for repeats."""
        envelope, payload = decode(frames)
        if isinstance(envelope.body, m.Unknown):
            self._outbox.answer(envelope.seq)
            for seq in envelope.body.seqs:
                self._again(seq)
            return None
        if envelope.seq == 0 or self._outbox.answer(envelope.seq):
            return envelope.seq, envelope.body, payload
        return None

    def _again(self, seq: int) -> None:
        sent = self._outbox.content(seq)
        if sent is not None:
            self.hub.send(self.channel, [encode(seq, self._outbox.acked, sent.body), *sent.frames])

    def probe(self, now: float, at_once: bool = False) -> None:
        """Ask after requests whose answer is overdue; ``at_once`` where a connection was lost."""
        late = []
        for seq in self._outbox.overdue(now, 0.0 if at_once else PROBE_AFTER_S):
            sent = self._outbox.content(seq)
            if sent is not None and isinstance(sent.body, m.Probe):
                self._outbox.answer(seq)
            else:
                late.append(seq)
        if late:
            self.send(m.Probe(late), (), now)

    def sent(self, seq: int) -> Sent | None:
        """Return a request that is not answered yet."""
        return self._outbox.content(seq)
