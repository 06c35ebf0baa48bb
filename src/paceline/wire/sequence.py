"""Exactly-once requests over a transport that may lose or repeat messages.

The sender numbers its requests and keeps each until it is answered; it says with every message up to where all are
answered. The receiver keeps what it has seen beyond that, so a repeated request is recognised and a lost answer can be
given again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Content = TypeVar("Content")
Result = TypeVar("Result")

#: Requests one peer may have outstanding; more than that is not a peer but an attack or a bug.
MAX_OUTSTANDING = 65_536


@dataclass
class _Sent(Generic[Content]):
    content: Content
    since: float
    asked: float


class Outbox(Generic[Content]):
    """The sender's side. Times are whatever clock the caller uses, in seconds."""

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
        self._sent[seq] = _Sent(content, now, now)
        return seq

    def answer(self, seq: int) -> bool:
        """Note an answer; False when it is a repeat or nobody asked."""
        return self._sent.pop(seq, None) is not None

    def content(self, seq: int) -> Content | None:
        """Return an unanswered request, to be sent again."""
        sent = self._sent.get(seq)
        return sent.content if sent else None

    def since(self, seq: int) -> float | None:
        """Return when an unanswered request was made."""
        sent = self._sent.get(seq)
        return sent.since if sent else None

    def overdue(self, now: float, after_s: float) -> list[int]:
        """Return requests without news for ``after_s`` seconds; they count as asked for now."""
        late = [seq for seq, sent in self._sent.items() if now - sent.asked >= after_s]
        for seq in late:
            self._sent[seq].asked = now
        return late


class Inbox(Generic[Result]):
    """The receiver's side, for one peer."""

    def __init__(self) -> None:
        self._acked = 0
        self._seen: dict[int, Result | None] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def arrive(self, seq: int, acked: int) -> bool:
        """Note a request; True when it is new and to be carried out.

        Raises:
            ValueError: numbers that no correct sender uses.
        """
        if acked >= seq:
            raise ValueError(f"request {seq} says that everything up to {acked} is answered")
        self._forget(acked)
        if seq <= self._acked or seq in self._seen:
            return False
        if len(self._seen) >= MAX_OUTSTANDING:
            raise ValueError(f"more than {MAX_OUTSTANDING} requests without an answer")
        self._seen[seq] = None
        return True

    def finish(self, seq: int, result: Result) -> None:
        """Keep what a request resulted in, until the peer says that it got the answer."""
        if seq in self._seen:
            self._seen[seq] = result

    def result(self, seq: int) -> Result | None:
        """Return what a request resulted in; None while it is in progress or when it is forgotten."""
        return self._seen.get(seq)

    def knows(self, seq: int) -> bool:
        """Tell whether a request has arrived."""
        return seq <= self._acked or seq in self._seen

    def _forget(self, acked: int) -> None:
        if acked > self._acked:
            for seq in [seq for seq in self._seen if seq <= acked]:
                del self._seen[seq]
            self._acked = acked
