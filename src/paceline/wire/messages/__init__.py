"""The messages, as msgspec structs. A message with a field outside of its limits is refused."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from paceline.wire.messages.common import (
    Done,
    Failed,
    Probe,
    Unknown,
)
from paceline.wire.messages.data import (
    AbsentRange,
    Answer,
    AskMissing,
    AskNorm,
    AskStats,
    AskValues,
    BucketSpec,
    Command,
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
from paceline.wire.messages.membership import (
    AskAbsent,
    AskSamples,
    AskStatus,
    AwaitSamples,
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
    News,
    Publish,
    ReturnSamples,
    Samples,
    SamplesLeft,
    Sighting,
    Spread,
    State,
    Status,
    Suspect,
    TakeSamples,
    Welcome,
)

PROTOCOL = 1

Request: TypeAlias = (
    Hello | Heartbeat | Bye | Claim | Enter | Gather | Publish | Lookup | AskStatus | AskAbsent
    | TakeSamples | AwaitSamples | ReturnSamples | AskSamples
    | OpenStore | Init | SetUpdater | SetCompression | Push | Pull | MapArena | GetState | SetState
    | Command | AskStats | AskMissing | Leave | Pause | PullRows | AskValues | ForwardBuckets
    | PushSum | OnBehalf | Regroup | SetValues | AskNorm | Commit | Probe
)  # fmt: skip

Reply: TypeAlias = (
    Welcome
    | News
    | Found
    | Gathered
    | Samples
    | SamplesLeft
    | Status
    | Values
    | StateIs
    | Answer
    | StatsAre
    | Missing
    | ValuesAt
    | NormIs
    | Done
    | Failed
    | Unknown
)

Body: TypeAlias = Request | Reply


class Envelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What every message travels in.

    A request has its sequence number, counted from 1 by the sender; its answer has the same. Sequence number 0 is
    news that was sent unasked.
    """

    seq: Number
    acked: Number
    """All requests up to here are answered; the receiver may forget them."""
    body: Body


__all__ = [
    "PROTOCOL",
    "AbsentRange",
    "Answer",
    "AskAbsent",
    "AskMissing",
    "AskNorm",
    "AskSamples",
    "AskStats",
    "AskStatus",
    "AskValues",
    "AwaitSamples",
    "BlockSpec",
    "Body",
    "BucketSpec",
    "Bye",
    "Claim",
    "Command",
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
    "Member",
    "Message",
    "Missing",
    "News",
    "NormIs",
    "OnBehalf",
    "OpenStore",
    "Pause",
    "Probe",
    "Publish",
    "Pull",
    "PullRows",
    "Push",
    "PushSum",
    "Regroup",
    "Reply",
    "Request",
    "ReturnSamples",
    "Samples",
    "SamplesLeft",
    "SetCompression",
    "SetState",
    "SetUpdater",
    "SetValues",
    "Share",
    "Sighting",
    "Spread",
    "State",
    "StateIs",
    "StateItem",
    "StatsAre",
    "Status",
    "Suspect",
    "TakeSamples",
    "Unknown",
    "Values",
    "ValuesAt",
    "Welcome",
]
