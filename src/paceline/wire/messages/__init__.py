"""The messages, as msgspec structs. A message with a field outside of its limits is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeAlias, TypeVar, get_args

import msgspec

from paceline.wire.messages.common import (
    Done,
    Failed,
    Probe,
    Unknown,
)
from paceline.wire.messages.data import (
    AskMissing,
    AskNorm,
    AskStats,
    AskValues,
    Away,
    Back,
    BucketSpec,
    Command,
    CommandAnswer,
    Commit,
    Entry,
    GetState,
    Init,
    KnownRange,
    Leave,
    MapArena,
    Missing,
    NormIs,
    OpenStore,
    Pause,
    Pull,
    PullRows,
    Push,
    Regroup,
    SetCompression,
    SetState,
    SetUpdater,
    SetValues,
    Span,
    StateIs,
    StateItem,
    StatsAre,
    Values,
    ValuesAt,
)
from paceline.wire.messages.fields import Message, Number
from paceline.wire.messages.forwarding import (
    ForwardBuckets,
    ForwardedBucket,
    OnBehalf,
    PushSum,
    Share,
)
from paceline.wire.messages.meeting import AskNotMet, BoardIs, Meet, Met, TakeAny, UseBoard
from paceline.wire.messages.membership import (
    AccountReport,
    AskAbsent,
    AskStatus,
    BlockSpec,
    Bye,
    Claim,
    Death,
    Enter,
    Found,
    Gather,
    Gathered,
    Heartbeat,
    Hello,
    KeySpec,
    Lookup,
    Member,
    MemberState,
    News,
    Publish,
    ReportedFigures,
    Sighting,
    SilentMember,
    Spread,
    Status,
    StepsLeft,
    Told,
    WeightSums,
    Welcome,
    Window,
)
from paceline.wire.messages.pooling import (
    AskSamples,
    AwaitSamples,
    PoolSamples,
    ReturnSamples,
    SamplesLeft,
    TakeSamples,
)
from paceline.wire.messages.tracing import AskTrace, TraceEvents, TraceIs, TracePart

#: Raised by hand when messages with the same fields mean something else.
PROTOCOL = 2

Request: TypeAlias = (
    Hello | Heartbeat | Bye | Claim | Enter | Gather | Publish | Lookup | AskStatus | AskAbsent | AskTrace
    | TakeSamples | AwaitSamples | ReturnSamples | AskSamples
    | OpenStore | Init | SetUpdater | SetCompression | Push | Pull | MapArena | GetState | SetState
    | Command | AskStats | AskMissing | Leave | Pause | Away | Back | PullRows | AskValues | ForwardBuckets
    | PushSum | OnBehalf | Regroup | SetValues | AskNorm | Commit | Probe
    | Meet | TakeAny | AskNotMet | UseBoard
)  # fmt: skip

Reply: TypeAlias = (
    Welcome
    | News
    | Found
    | Gathered
    | PoolSamples
    | SamplesLeft
    | Status
    | TraceIs
    | Values
    | StateIs
    | CommandAnswer
    | StatsAre
    | Missing
    | ValuesAt
    | NormIs
    | Met
    | BoardIs
    | Done
    | Failed
    | Unknown
)

Body: TypeAlias = Request | Reply

#: By class: the number that says on the wire, and in records of events, which message it is.
TAGS: Mapping[type, int] = {one: one.__struct_config__.tag for one in get_args(Body)}

Content = TypeVar("Content")


class Envelope(msgspec.Struct, Generic[Content], array_like=True, forbid_unknown_fields=True):
    """The envelope of every message; its content is a :data:`Body`, or at the answering side a :data:`Request`.

    A request has its sequence number, counted from 1 by the sender; its answer has the same. Sequence number 0 is
    news that was sent unasked.
    """

    seq: Number
    acked: Number
    """All requests up to here are answered; the receiver may forget them."""
    body: Content
    held: Number = 0
    """Of an answer: microseconds from the arrival of the request to the answer. The rest of the asker's time is that of
    the way there and back."""


__all__ = [
    "PROTOCOL",
    "TAGS",
    "AccountReport",
    "AskAbsent",
    "AskMissing",
    "AskNorm",
    "AskNotMet",
    "AskSamples",
    "AskStats",
    "AskStatus",
    "AskTrace",
    "AskValues",
    "AwaitSamples",
    "Away",
    "Back",
    "BlockSpec",
    "BoardIs",
    "Body",
    "BucketSpec",
    "Bye",
    "Claim",
    "Command",
    "CommandAnswer",
    "Commit",
    "Death",
    "Done",
    "Enter",
    "Entry",
    "Envelope",
    "Failed",
    "ForwardBuckets",
    "ForwardedBucket",
    "Found",
    "Gather",
    "Gathered",
    "GetState",
    "Heartbeat",
    "Hello",
    "Init",
    "KeySpec",
    "KnownRange",
    "Leave",
    "Lookup",
    "MapArena",
    "Meet",
    "Member",
    "MemberState",
    "Message",
    "Met",
    "Missing",
    "News",
    "NormIs",
    "OnBehalf",
    "OpenStore",
    "Pause",
    "PoolSamples",
    "Probe",
    "Publish",
    "Pull",
    "PullRows",
    "Push",
    "PushSum",
    "Regroup",
    "Reply",
    "ReportedFigures",
    "Request",
    "ReturnSamples",
    "SamplesLeft",
    "SetCompression",
    "SetState",
    "SetUpdater",
    "SetValues",
    "Share",
    "Sighting",
    "SilentMember",
    "Span",
    "Spread",
    "StateIs",
    "StateItem",
    "StatsAre",
    "Status",
    "StepsLeft",
    "TakeAny",
    "TakeSamples",
    "Told",
    "TraceEvents",
    "TraceIs",
    "TracePart",
    "Unknown",
    "UseBoard",
    "Values",
    "ValuesAt",
    "WeightSums",
    "Welcome",
    "Window",
]
