"""Actions that the scheduler's machine tells the scheduler to carry out, and the name of a request that waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.naming import listed
from paceline.wire import messages as m
from paceline.wire.limits import MAX_TEXT

#: (role, rank)
MemberKey: TypeAlias = tuple[str, int]

#: Members that one text names.
MOST_NAMED = 12


@dataclass(frozen=True)
class Answer:
    """Send a body to a peer; seq 0 is news that it did not ask for."""

    peer: bytes
    seq: int
    body: m.Reply


@dataclass(frozen=True)
class Finish:
    """The job is over; the scheduler exits with this code."""

    code: int


@dataclass(frozen=True)
class Warn:
    """Write a line to the log."""

    text: str


Action: TypeAlias = Answer | Finish | Warn


@dataclass
class Waiting:
    """A request that is answered later."""

    peer: bytes
    seq: int
    keys: frozenset[int | str] = field(default_factory=frozenset)
    """Keys that a lookup wants; empty: all there are."""
    payload: bytes | None = None
    """The bytes that it brought to a gather; None at a barrier."""
    pauses: bool = False
    """The worker at the barrier pauses at the servers."""
    lets_in: bool = False
    """Replacements may be let in while all workers are there."""
    why_shut: str = ""
    """Why not, nevertheless."""


def refuse(peer: bytes, seq: int, text: str) -> Answer:
    """Return the answer to a request that the scheduler does not take."""
    return Answer(peer, seq, m.Failed("ProtocolError", text))


def describe(death: m.Death) -> str:
    """Return a sentence about a death."""
    where = f" on {death.host}" if death.host else ""
    return f"{death.role} {death.rank}{where} died: {death.reason}"


def describe_all(deaths: Iterable[m.Death]) -> str:
    """Return sentences about the first deaths, and the number of further ones: a message takes no longer text."""
    return listed(map(describe, deaths), MOST_NAMED, "; ")[:MAX_TEXT]
