"""Events of processes for a trace of the job."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from paceline.wire.limits import MAX_AMOUNT, MAX_TRACE_BYTES
from paceline.wire.messages.fields import (
    OF_MEMBERS,
    Amount,
    Count,
    HostName,
    Line,
    Message,
    Number,
    Rank,
    Reply,
    Request,
    Role,
)

_Time = Annotated[float, Meta(ge=-MAX_AMOUNT, le=MAX_AMOUNT)]
"""Seconds on a clock, or between two."""


class TraceEvents(Message):
    """Events of a process for a trace."""

    trace: Number
    """Number of the trace."""
    since: _Time
    """Time on its clock from which on it sends all events."""
    until: _Time
    """Time on its clock at which these events were taken."""
    unix: _Time
    """Unix time less its clock, in seconds."""
    offset: _Time
    """The scheduler's clock less its clock."""
    error: Amount
    """Bound of the offset's error."""
    lost: Count
    """Events that were written over before this heartbeat."""
    records: Annotated[bytes, Meta(max_length=MAX_TRACE_BYTES)]
    """As in :mod:`paceline.observe.ring`."""


class AskTrace(Request, tag=19):
    """Begin a trace, or ask for its events; answered with :class:`TraceIs`. Every holder of the job's key may."""

    number: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    """Chosen by the asker."""
    rounds: Annotated[int, Meta(ge=1, le=10_000)]
    """Whole rounds of every worker."""
    timeout_s: Annotated[float, Meta(ge=0, le=3600)]
    part: Count
    """The first part to return."""


class TracePart(Message):
    """Events of a member."""

    role: Role
    rank: Rank
    host: HostName
    pid: Number
    events: TraceEvents


class TraceIs(Reply, tag=45):
    """Parts of a trace."""

    parts: Annotated[list[TracePart], OF_MEMBERS]
    is_over: bool
    """No part follows."""
    says: Line
    """Why the trace has less than was asked for."""
