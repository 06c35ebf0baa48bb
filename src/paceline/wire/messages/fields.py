"""Types of message fields, the bases of all messages, and their envelope."""

from __future__ import annotations

import sys
from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from paceline.wire.limits import (
    FIGURE_NAME,
    MAX_AMOUNT,
    MAX_DIMENSIONS,
    MAX_FIGURE_NAME,
    MAX_GATHER_BYTES,
    MAX_KEYS,
    MAX_MEMBERS,
    MAX_NAME,
    MAX_NAMES,
    MAX_NUMEL,
    MAX_RANK,
    MAX_TEXT,
)

Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME)]
_SHOWN = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
HostName: TypeAlias = Annotated[str, Meta(max_length=1024, pattern=_SHOWN)]
"""A name without control characters: logs, tables and pages show it."""
Line: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT, pattern=_SHOWN)]
"""A line without control characters, for tables and pages."""
KeyName: TypeAlias = int | Name
Rank: TypeAlias = Annotated[int, Meta(ge=-1, le=MAX_RANK)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_NUMEL)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_AMOUNT)]
"""A figure that is neither negative nor NaN, and so small that sums of many stay finite."""
Microseconds: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]
Finite: TypeAlias = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A figure that is neither infinite nor NaN."""
FigureName: TypeAlias = Annotated[str, Meta(max_length=MAX_FIGURE_NAME, pattern=FIGURE_NAME)]
"""Name of a figure that a script reports."""
Role: TypeAlias = Annotated[str, Meta(max_length=16, pattern=r"^(worker|server|scheduler)\Z")]
Letter: TypeAlias = Annotated[str, Meta(max_length=1)]
Digest: TypeAlias = Annotated[bytes, Meta(max_length=64)]
Note: TypeAlias = Annotated[bytes, Meta(max_length=64)]
Blob: TypeAlias = Annotated[bytes, Meta(max_length=1 << 20)]
Saying: TypeAlias = Annotated[bytes, Meta(max_length=MAX_GATHER_BYTES)]

OF_KEYS, OF_MEMBERS, OF_NAMES = Meta(max_length=MAX_KEYS), Meta(max_length=MAX_MEMBERS), Meta(max_length=MAX_NAMES)
"""Limits of lists: a short message can be a long list of empty ones, which takes 60 times as much memory."""
Ranks: TypeAlias = Annotated[list[Rank], OF_MEMBERS]
Groups: TypeAlias = Annotated[list[Ranks], OF_MEMBERS]
Notes: TypeAlias = Annotated[list[tuple[Rank, Note]], OF_MEMBERS]
"""Notes of workers."""
Counts: TypeAlias = Annotated[list[Count], OF_KEYS]
Shape: TypeAlias = Annotated[list[Count], Meta(max_length=MAX_DIMENSIONS)]
Ranges: TypeAlias = Annotated[list[tuple[Count, Count]], OF_KEYS]
"""Beginnings and ends of ranges of samples."""


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all messages; on the wire an array that begins with the tag."""


class Request(Message):
    """Base of all messages that are answered."""


class Reply(Message):
    """Base of all answers, and of the news that are sent unasked."""


Body: TypeAlias = Request | Reply

Content = TypeVar("Content")


class Envelope(msgspec.Struct, Generic[Content], array_like=True, forbid_unknown_fields=True):
    """The envelope of every message; its content is a :data:`Body`, or at the answering side a :class:`Request`.

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
