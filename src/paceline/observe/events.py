"""Events of processes, and their records. Pure.

An event is a kind, a time on the monotonic clock, a thread, and the values of this table:

| kind | number | peer | value | noted |
|---|---|---|---|---|
| ``PART`` | the part | | | the account: its thread begins a part (:mod:`~paceline.observe.account`) |
| ``ROUND`` | the round | | | a worker: the round's first push |
| ``SENT``, ``GOT`` | the request's | who is asked | the message's tag | the asker: a request, its answer |
| ``TOOK``, ``ANSWERED`` | the same | who asks | the same | a server or the scheduler: a request, its answer |
| ``JOINED`` | | this process | | all members are there |
| ``DIED`` | | who died | | the scheduler, or the news of it |
| ``LEFT`` | | this process | 1: it failed | it says goodbye |

Heartbeats are no events. A record has its number at both ends, so a reader knows one that a kill has torn.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("part", "round", "sent", "got", "took", "answered", "joined", "died", "left")
PART, ROUND, SENT, GOT, TOOK, ANSWERED, JOINED, DIED, LEFT = range(len(KINDS))

ROLES = ("scheduler", "server", "worker")

#: Seconds beyond which a record has no time. Messages take none beyond it either, and the launcher imports no messages.
MOST_S = 10**15

#: Number, time, thread, number of the kind's own, peer, value, kind, and the record's number again.
RECORD = struct.Struct("<QdQQIHHQ")


class Event(NamedTuple):
    """A record of a ring."""

    order: int
    time: float
    thread: int
    number: int
    peer: int
    value: int
    kind: int


@dataclass(frozen=True)
class Source:
    """A process, and how its clock relates to others. Times are seconds."""

    role: str
    rank: int
    host: str
    pid: int
    unix: float
    """Unix time less its clock."""
    offset: float
    """The scheduler's clock less its clock."""
    error: float
    """Bound of the offset's error; infinite: the offset is not known."""


def member(role: str, rank: int) -> int:
    """Return the number that stands for a member in events."""
    return ROLES.index(role) << 24 | max(rank, 0)


def member_of(peer: int) -> tuple[str, int]:
    """Return role and rank."""
    return ROLES[(peer >> 24) % len(ROLES)], peer & 0xFFFFFF


def parse(records: bytes) -> list[Event]:
    """Return the whole records in their order; torn and empty ones, and those of no time, are left out."""
    whole = records[: len(records) - len(records) % RECORD.size]
    return sorted(
        Event(*values[:-1])
        for values in RECORD.iter_unpack(whole)
        if values[0] == values[-1] and values[0] and abs(values[1]) <= MOST_S
    )
