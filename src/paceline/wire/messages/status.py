"""The status of a job: its members, and how each does."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from paceline.wire.limits import MAX_BINS, MAX_FIGURES, MAX_TEXT
from paceline.wire.messages.changes import Change
from paceline.wire.messages.fields import (
    OF_MEMBERS,
    Amount,
    Count,
    FigureName,
    Finite,
    Line,
    Message,
    Number,
    Rank,
    Reply,
    Request,
    Role,
)
from paceline.wire.messages.membership import Death, Member, StepsLeft, Window


class AskStatus(Request, tag=11):
    """Ask the scheduler for all members and their state."""


class MemberState(Message):
    """How a member does."""

    round: Number
    pace: Finite
    """Rounds per second, of late."""
    silent_s: Finite
    """Seconds since its last message."""
    memory: Number
    """Bytes."""
    sent: Number
    received: Number
    """Bytes over the network."""
    phase: Annotated[str, Meta(max_length=8, pattern=r"^(live|silent|leaving|left|dead)\Z")]
    waits_for: Annotated[str, Meta(max_length=MAX_TEXT, pattern=r"^([0-9]{1,7}( [0-9]{1,7})*)?\Z")]
    """Ranks of workers that have not come to the barrier where it waits, ``1 3``; empty if it waits at none."""
    step_s: Amount = 0.0
    """Seconds that a worker computes in a step, without its waits; 0: not known."""
    recent: Annotated[list[Window], Meta(max_length=1)] = msgspec.field(default_factory=list)
    """The account of its last rounds in one window; none: it has said nothing yet."""
    whole: Annotated[list[Window], OF_MEMBERS] = msgspec.field(default_factory=list)
    """The same of all its rounds so far."""
    figures: Annotated[dict[FigureName, tuple[Number, Finite]], Meta(max_length=MAX_FIGURES)] = msgspec.field(
        default_factory=dict
    )
    """The last figures that its script has reported, each with its step."""
    came_last: Number = 0
    """Cohorts that a worker was the last of, at any server; ``late_s`` is how long after the others in all."""
    late_s: Amount = 0.0
    held: tuple[Count, Count] = (0, 0)
    """Of a server: its values, and the buckets that they are in."""
    progress: StepsLeft | None = None
    """None: its script has told no total of steps."""
    still_s: Amount | None = None
    """Seconds since it got on: took a step, or sent or received a part of a tensor. None: it never did."""


class Told(Message):
    """A line about a process that became slow, or is so no more."""

    role: Role
    rank: Rank
    ago_s: Amount
    text: Line


class Status(Reply, tag=12):
    """Members, how each does, and the deaths."""

    members: Annotated[list[Member], OF_MEMBERS]
    states: Annotated[list[MemberState], OF_MEMBERS]
    deaths: Annotated[list[Death], OF_MEMBERS]
    auto: Annotated[list[Line], OF_MEMBERS] = msgspec.field(default_factory=list)
    """The choice of ``dist_auto`` since it changed, and a better one, each with the reason."""
    verdicts: Annotated[list[Line], OF_MEMBERS] = msgspec.field(default_factory=list)
    """The processes that are slow now: why, since when, what it costs, and what to do."""
    told: Annotated[list[Told], OF_MEMBERS] = msgspec.field(default_factory=list)
    """The last changes of these, the oldest first."""
    figures: Annotated[dict[FigureName, tuple[Number, Finite]], Meta(max_length=MAX_FIGURES)] = msgspec.field(
        default_factory=dict
    )
    """The last figures of the job, each with its step: means over the workers, weighted by samples."""
    cohorts: Number = 0
    """Cohorts of several workers that servers have merged."""
    staleness: Annotated[list[tuple[Number, Number]], Meta(max_length=MAX_BINS)] = msgspec.field(default_factory=list)
    """How many updates of servers had which staleness so far."""
    weighing: Annotated[list[Line], OF_MEMBERS] = msgspec.field(default_factory=list)
    """How workers weigh in the mean of their gradients, the newest last."""
    changes: Annotated[list[Change], OF_MEMBERS] = msgspec.field(default_factory=list)
    """The last changes of the membership, the oldest first."""

    def __post_init__(self) -> None:
        if len(self.members) != len(self.states):
            raise ValueError(f"{len(self.members)} members with {len(self.states)} states")
