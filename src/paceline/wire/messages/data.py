"""Between workers and servers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from paceline.wire.messages.fields import (
    OF_KEYS,
    Blob,
    Count,
    Counts,
    Groups,
    KeyName,
    Message,
    Name,
    Note,
    Notes,
    Number,
    Rank,
    Ranks,
    Reply,
    Request,
    Shape,
    Text,
)


class OpenStore(Request, tag=20):
    """Create a store on a server, or check that it is the same."""

    store: Name
    merge: Name
    groups: Groups
    first: Rank
    bound: Rank
    """-1: no bound."""
    weighting: Name
    mean: bool
    """Merge to the mean over samples instead of the sum."""
    local_merge: bool = False
    """Workers of one host that step together push to a server of their own host, which forwards their sum."""
    clip_norm: float = 0.0
    """Largest norm of a merged gradient over all keys; updates wait for a :class:`Commit`. 0: no limit."""
    age: Rank = -1
    """Missed updates beyond which a push is dropped; -1: no limit."""
    lr_scale: Name = "update"
    grace_s: float = 0.0
    """Seconds for which an update of merge ``first`` waits for further pushes after its K-th one."""


class BucketSpec(Message):
    """A bucket that the server will own: its index in the block's layout, its length, and the parts in order."""

    index: Count
    length: Count
    keys: Annotated[list[KeyName], OF_KEYS]
    lengths: Counts
    shapes: Annotated[list[Shape], OF_KEYS]
    """Shape of a part that is the whole key, else empty."""
    offsets: Counts = msgspec.field(default_factory=list)
    """First element of each part inside its key; empty: all 0."""


class Init(Request, tag=21):
    """Initialise buckets; one frame of values per bucket."""

    store: Name
    block: Number
    dtype: Name
    buckets: Annotated[list[BucketSpec], OF_KEYS]
    answers: Name = ""
    """Rows in the answer to a push of rows: none; the ``changed`` rows of the value, as they are after the update; or
    the ``merged`` rows of the round: then no value is stored, and its bucket has one element."""


class SetValues(Request, tag=54):
    """Overwrite values outside of any round; one frame of values per entry. The rounds of the entries do not count."""

    store: Name
    entries: Annotated[list[Entry], OF_KEYS]


class SetUpdater(Request, tag=22):
    """Set the updater of a store, as an encoded UpdaterSpec. ``fresh``: without the state that the same one has."""

    store: Name
    spec: Blob
    fresh: bool = False


class SetCompression(Request, tag=23):
    """Set the codec of pushes or of pulls, as encoded parameters."""

    store: Name
    params: Blob
    leg: Name = "push"


class Span(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, order=True):
    """A range of a bucket: elements ``start`` to ``start + length``."""

    block: Number
    bucket: Count
    start: Count
    length: Count

    @property
    def stop(self) -> int:
        """First element after the range."""
        return self.start + self.length

    @property
    def place(self) -> tuple[int, int]:
        """Number of the bucket's block, and its index there."""
        return self.block, self.bucket

    def part(self, start: int, stop: int) -> Span:
        """Return the part between two elements of the bucket, which overlap the range."""
        first = max(self.start, start)
        return Span(self.block, self.bucket, first, min(self.start + self.length, stop) - first)

    def overlaps(self, other: Span) -> bool:
        """Tell whether another range of the same bucket has an element of this one."""
        return self.start < other.start + other.length and other.start < self.start + self.length


class Entry(Span, frozen=True):
    """A range of a bucket, and the round of the push (0 for a pull)."""

    round: Number


class Push(Request, tag=24):
    """Push values; one frame per entry, or none when the values lie in shared memory."""

    store: Name
    entries: Annotated[list[Entry], OF_KEYS]
    samples: float
    options: Blob
    """Encoded StepOptions of the optimizer; empty: unchanged."""
    coded: bool
    want: bool
    """Send the new values with the answer."""
    shared: bool
    """Values are read from and written to shared memory."""
    rows: bool = False
    """Two frames per entry: ascending row numbers (int64) and those rows; the entry is a whole key with a bucket.

    With ``want`` there is one entry, and the answer has frames of the same kind, or none when there is no merged
    gradient.
    """
    absent: Annotated[list[Span], OF_KEYS] = msgspec.field(default_factory=list)
    """Parts of the entries, each a whole key or all of a key that lies in the bucket, for which the worker has no
    gradient. They count as zeros, and are not updated where no worker of the cohort has one. An entry that is absent as
    a whole has an empty frame, and is not read."""
    skip: bool = False
    """No server may apply this round: there are no frames, and no memory is read."""
    note: Note = b""
    """The worker's note for all workers whose pushes make one update with this one."""


class Pull(Request, tag=25):
    """Ask for values."""

    store: Name
    entries: Annotated[list[Entry], OF_KEYS]
    shared: bool


class KnownRange(Span, frozen=True):
    """A range of a bucket as a worker knows it after an answer, in a store that compresses pulls."""

    version: Number
    """Counts how often the known values have moved; not the version of the rule."""
    coded: bool
    """The frame is an encoded difference to the version before; otherwise it holds values."""


class Values(Reply, tag=26):
    """Answer to a push or pull: one frame per entry where values were asked for.

    In a store that compresses pulls it is one frame per known range, or none when the values lie in shared memory.
    """

    known: Annotated[list[KnownRange], OF_KEYS] = msgspec.field(default_factory=list)
    absent: Annotated[list[Span], OF_KEYS] = msgspec.field(default_factory=list)
    """To a push: the parts of its entries for which no worker had a gradient in that update."""
    notes: Notes = msgspec.field(default_factory=list)
    """To a push: the notes of the pushes that made that update, the same for all workers behind it."""


class MapArena(Request, tag=27):
    """Offer shared memory: the memfds of a process on the same host that hold a block's values and gradients."""

    store: Name
    block: Number
    pid: Number
    value_fd: Annotated[int, Meta(ge=-1, le=2**31)]
    """-1: the worker maps the server's own values."""
    grad_fd: Number
    size_bytes: Count
    starts: Counts
    """First element inside the arena, per bucket index of the block."""


class AskValues(Request, tag=40):
    """Ask where in shared memory a server keeps the values of a block."""

    store: Name
    block: Number


class ValuesAt(Reply, tag=41):
    """The memfd that holds the values of a server's buckets of a block."""

    pid: Number
    fd: Number
    starts: Counts
    """First element inside the file, per bucket of this server in the order of the layout; empty: there is no file."""


class GetState(Request, tag=28):
    """Ask for the optimizer state of ranges."""

    store: Name
    entries: Annotated[list[Entry], OF_KEYS]


class StateItem(Span, frozen=True):
    """One tensor of state of a range of one key."""

    name: Name
    dtype: Name
    shape: Shape


class SetState(Request, tag=29):
    """Set optimizer state; frames as listed."""

    store: Name
    items: Annotated[list[StateItem], OF_KEYS]


class StateIs(Reply, tag=30):
    """Optimizer state; one frame per item."""

    items: Annotated[list[StateItem], OF_KEYS]


class Command(Request, tag=31):
    """Run a registered command on a server."""

    head: Name
    body: Text


class CommandAnswer(Reply, tag=32):
    """The result of a command."""

    body: Text


class AskStats(Request, tag=33):
    """Ask for the counters of a store."""

    store: Name


class StatsAre(Reply, tag=34):
    """Counters as JSON."""

    body: Text


class AskMissing(Request, tag=35):
    """Ask which workers an unanswered push waits for."""

    store: Name
    entry: Entry


class Missing(Reply, tag=36):
    """Workers that have not pushed, or not entered a barrier."""

    workers: Ranks
    story: Text = ""
    """To a push: the events of the first slot that waits for them, for the error; empty where none waits."""


class Leave(Request, tag=37):
    """A worker leaves a store; others wait for it no more."""

    store: Name


class AskNorm(Request, tag=55):
    """Ask for the norm of the merged gradient over a worker's pushes here; answered when all of them are merged."""

    store: Name
    entries: Annotated[list[Entry], OF_KEYS]


class NormIs(Reply, tag=56):
    """A server's part of the norm of a merged gradient."""

    squares: float
    """Sum of squares, after the mean."""
    skipped: bool
    """A worker has said that the update must not be made."""


class Commit(Request, tag=57):
    """Make the updates of a pushed round, with merged gradients times a factor; the first commit of a unit counts."""

    store: Name
    entries: Annotated[list[Entry], OF_KEYS]
    factor: float
    skip: bool = False
    """Make none of them."""


class Pause(Request, tag=38):
    """A worker enters a barrier of a store; until all have, others do not wait for its pushes."""

    store: Name


class Away(Request, tag=70):
    """Others do not wait for a worker's pushes to a store until it says :class:`Back`, or a barrier has opened."""

    store: Name


class Back(Request, tag=71):
    """Others wait for a worker's pushes to a store again, from its next round on; answered with :class:`Done`."""

    store: Name
    phase: Number
    """The round joins cohorts of this phase. One that the worker has reached already only ends a pause."""


class Regroup(Request, tag=59):
    """A worker steps with another group of a store from its next round on; answered with :class:`Done`."""

    store: Name
    generation: Number
    """Generation of the groups, from 1."""
    groups: Groups


class PullRows(Request, tag=39):
    """Ask for some rows of a key that has a bucket for itself.

    It has one frame of ascending row numbers (int64), and the answer has one frame of rows. Without a frame it asks for
    all rows that changed since this worker last read, of a key whose pushes are answered by ``changed`` rows; that
    answer has two frames, as a push of rows.
    """

    store: Name
    entry: Entry
