"""Exactly-once requests over a transport that may lose, repeat or reorder messages. Pure.

The sender (:class:`Outbox`) numbers its requests from 1, keeps each until it is answered, and says with every message
up to which number all are answered (``acked``). The receiver (:class:`Inbox`) carries out a request when its number is
the next one, and keeps the result until the sender says that it has the answer. So requests are carried out in the
order of their numbers, too.

States of a number at the receiver:

| state | event | next state |
|---|---|---|
| new | the request arrives, and one before it has not | new; no effect |
| new | the request arrives, and all before it have | in progress: it is carried out, once |
| in progress | the request arrives again | in progress; no effect |
| in progress | it is carried out | answered: the result is kept and sent |
| answered | the request or a probe arrives | answered; the result is sent again |
| new, in progress, answered | a message with ``acked`` of this number or a higher one | forgotten |
| forgotten | the request arrives again | forgotten; no effect |

A probe for a number that is new makes the receiver say so, and the sender sends that request and all later ones again.

Requests are not carried out exactly once with:

- A receiver that restarts, or a sender that connects under a new identity and repeats requests of the old one:
  numbers count per connection.
- A sender that reuses a number, leaves one out, or says ``acked`` before it has the answer.
- Frames that change before the answer: a request that is sent again has other values.
- A receiver that carries out requests before their sender is a member: strangers are not remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Content = TypeVar("Content")
Result = TypeVar("Result")

#: Limit of unanswered requests of one peer. More are an attack or a bug, and are refused.
MAX_OUTSTANDING = 65_536


@dataclass
class _Sent(Generic[Content]):
    content: Content
    asked: float


class Outbox(Generic[Content]):
    """The sender's side, for one peer. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent[Content]] = {}
        self._next = 1

    @property
    def acked(self) -> int:
        """All requests up to this number are answered."""
        return next(iter(self._sent), self._next) - 1

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, content: Content, now: float) -> int:
        """Take a request; returns its number."""
        seq = self._next
        self._next += 1
        self._sent[seq] = _Sent(content, now)
        return seq

    def answer(self, seq: int) -> Content | None:
        """Note an answer; returns the request, or None when the answer is a repeat or no call asked."""
        sent = self._sent.pop(seq, None)
        return sent.content if sent else None

    def since(self, seq: int) -> list[Content]:
        """Return the unanswered requests from a number on, in order."""
        return [sent.content for one, sent in self._sent.items() if one >= seq]

    def overdue(self, now: float, after_s: float) -> list[int]:
        """Return requests that were sent or returned here at least ``after_s`` seconds ago, and are not answered."""
        late = [seq for seq, sent in self._sent.items() if now - sent.asked >= after_s]
        for seq in late:
            self._sent[seq].asked = now
        return late

    def drop(self) -> list[Content]:
        """Forget all unanswered requests; returns them."""
        dropped = [sent.content for sent in self._sent.values()]
        self._sent.clear()
        return dropped


class Size(NamedTuple):
    """Bytes of a message."""

    head: int
    """Without its payload."""
    whole: int


NOTHING = Size(0, 0)


class Inbox(Generic[Result]):
    """The receiver's side, for one peer.

    Attributes:
        kept: bytes of the requests in progress, and of the results that are kept.
    """

    def __init__(self) -> None:
        self._acked = self._last = 0
        """All up to these numbers are answered, or have arrived."""
        self._seen: dict[int, Result | None] = {}
        self._sizes: dict[int, Size] = {}
        self._arrived: dict[int, float] = {}
        """By number of a request in progress, when it arrived."""
        self.kept = NOTHING

    def __len__(self) -> int:
        """Return how many requests are in progress, or have a result that is kept."""
        return len(self._seen)

    def _keep(self, seq: int, size: Size = NOTHING) -> None:
        """Count a request or its result in place of what it was; without a size, it is forgotten."""
        before = self._sizes.pop(seq, NOTHING)
        if size.whole:
            self._sizes[seq] = size
        self.kept = Size(self.kept.head + size.head - before.head, self.kept.whole + size.whole - before.whole)

    def arrive(self, seq: int, acked: int, now: float = 0.0, size: Size = NOTHING) -> bool:
        """Note a request; returns True when it is the next one and must be carried out.

        Raises:
            ValueError: numbers that no correct sender uses.
        """
        if acked >= seq:
            raise ValueError(f"request {seq} says that everything up to {acked} is answered")
        if acked > self._acked:
            for one in list(self._seen):
                if one <= acked:
                    del self._seen[one]
                    self._arrived.pop(one, None)
                    self._keep(one)
            self._acked, self._last = acked, max(self._last, acked)
        if seq != self._last + 1:
            return False
        if len(self._seen) >= MAX_OUTSTANDING:
            raise ValueError(f"more than {MAX_OUTSTANDING} requests without an answer")
        self._seen[seq], self._arrived[seq], self._last = None, now, seq
        self._keep(seq, size)
        return True

    def held_s(self, seq: int, now: float) -> float:
        """Return how long ago a request in progress arrived, once; 0: it is not known."""
        return now - self._arrived.pop(seq, now)

    def finish(self, seq: int, result: Result, size: Size = NOTHING) -> None:
        """Keep the result of a request until the sender has the answer; also of a request that was not noted here."""
        if seq > self._acked:
            self._seen[seq], self._last = result, max(self._last, seq)
            self._keep(seq, size)

    def result(self, seq: int) -> Result | None:
        """Return the result of a request; None when it is new, in progress or forgotten."""
        return self._seen.get(seq)

    def knows(self, seq: int) -> bool:
        """Return whether a request has arrived."""
        return seq <= self._last
