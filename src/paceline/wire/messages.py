"""The messages, as msgspec structs. A field that does not fit its limits makes the whole message refused."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from paceline.wire.limits import MAX_NUMEL, MAX_RANK, MAX_TEXT

PROTOCOL = 1

Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Name: TypeAlias = Annotated[str, Meta(max_length=1024)]
KeyName: TypeAlias = int | Name
Rank: TypeAlias = Annotated[int, Meta(ge=-1, le=MAX_RANK)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_NUMEL)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Role: TypeAlias = Annotated[str, Meta(max_length=16, pattern="^(worker|server|scheduler)$")]
Digest: TypeAlias = Annotated[bytes, Meta(max_length=64)]
Blob: TypeAlias = Annotated[bytes, Meta(max_length=1 << 20)]


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all messages; on the wire an array that begins with the tag."""


# ---- membership: everybody and the scheduler ----------------------------------------------------------------------


class Hello(Message, tag=1):
    """Join the job."""

    protocol: Number
    job_id: Name
    role: Role
    rank: Rank
    local_rank: Rank
    host: Name
    host_id: Name
    pid: Number
    address: Name
    """Where a server listens for workers; empty for workers."""
    num_workers: Rank
    num_servers: Rank


class Member(Message):
    """A process of the job, as the scheduler knows it."""

    role: Role
    rank: Rank
    local_rank: Rank
    host: Name
    host_id: Name
    pid: Number
    address: Name
    token: Digest
    """Proves to a server that a connection belongs to this member."""


class Welcome(Message, tag=2):
    """Everybody is there: the newcomer's rank, and all members."""

    rank: Rank
    members: list[Member]


class Heartbeat(Message, tag=3):
    """A member lives, and has reached this round."""

    round: Number


class Death(Message):
    """A member that the job has lost."""

    role: Role
    rank: Rank
    host: Name
    reason: Text


class News(Message, tag=4):
    """The scheduler's answer to a heartbeat, also sent at once when something happens."""

    deaths: list[Death]
    shutdown: bool
    """All workers have left; servers go home."""


class Bye(Message, tag=5):
    """Leave the job; with a reason it is a failure and ends the job for all."""

    reason: Text


class Claim(Message, tag=6):
    """Say which member a further connection belongs to."""

    role: Role
    rank: Rank
    token: Digest


class Enter(Message, tag=7):
    """Enter a barrier; answered when every live worker has."""

    barrier: Name


class KeySpec(Message):
    """Name, shape and tag of a key."""

    name: KeyName
    shape: list[Count]
    tag: Number


class BlockSpec(Message):
    """The keys of one dtype that were initialised by one call, and what placed them."""

    block: Number
    dtype: Name
    keys: list[KeySpec]
    loads: list[Count]
    speeds: list[float]
    bound: Count
    policy: Name
    whole: bool
    rows: bool = False
    """Keys whose pushes may be rows, which go to their server directly."""


class Publish(Message, tag=8):
    """Rank 0 makes the place of keys known."""

    store: Name
    blocks: list[BlockSpec]


class Lookup(Message, tag=9):
    """Ask for the place of keys; answered when all of them are published."""

    store: Name
    keys: list[KeyName]


class Found(Message, tag=10):
    """The blocks that hold the keys asked for."""

    blocks: list[BlockSpec]


class AskStatus(Message, tag=11):
    """Ask the scheduler who is there and how they are."""


class Status(Message, tag=12):
    """Members with their last round and the seconds since they were heard."""

    members: list[Member]
    rounds: list[Number]
    silent_s: list[float]
    deaths: list[Death]


class AskAbsent(Message, tag=13):
    """Ask who has not entered a barrier yet; answered with :class:`Missing`."""

    barrier: Name


# ---- data: workers and servers ------------------------------------------------------------------------------------


class OpenStore(Message, tag=20):
    """Create a store on a server, or check that it is the same."""

    store: Name
    merge: Name
    groups: list[list[Rank]]
    first: Rank
    bound: Rank
    """-1: no bound."""
    weighting: Name
    age: Count
    mean: bool
    """Merge to the mean over samples instead of the sum."""
    local_merge: bool = False
    """Workers of one host that step together push through a server of their own host, which passes their sum on."""


class BucketSpec(Message):
    """A bucket that the server is to own: its index in the block's layout, its length, and the parts in order."""

    index: Count
    length: Count
    keys: list[KeyName]
    lengths: list[Count]
    shapes: list[list[Count]]
    """Shape of a part that is the whole key, else empty."""


class Init(Message, tag=21):
    """Initialise buckets; one frame of values per bucket."""

    store: Name
    block: Number
    dtype: Name
    buckets: list[BucketSpec]


class SetUpdater(Message, tag=22):
    """Set what a push does, as an encoded UpdaterSpec."""

    store: Name
    spec: Blob


class SetCompression(Message, tag=23):
    """Set the codec of pushes or of pulls, as encoded parameters."""

    store: Name
    params: Blob
    leg: Name = "push"


class Entry(Message):
    """A stretch of a bucket, and the round of the push (0 for a pull)."""

    block: Number
    bucket: Count
    start: Count
    length: Count
    round: Number


class Push(Message, tag=24):
    """Push values; one frame per entry, or none when they lie in shared memory."""

    store: Name
    entries: list[Entry]
    samples: float
    options: Blob
    """Encoded StepOptions of the optimizer; empty: unchanged."""
    coded: bool
    want: bool
    """Send the new values with the answer."""
    shared: bool
    """Values are read from and written to shared memory."""
    rows: bool = False
    """Two frames per entry: ascending row numbers (int64) and those rows; the entry is a whole key with a bucket."""


class Pull(Message, tag=25):
    """Ask for values."""

    store: Name
    entries: list[Entry]
    shared: bool


class Told(Message):
    """A stretch of a bucket as a worker knows it after an answer, in a store that compresses pulls."""

    block: Number
    bucket: Count
    start: Count
    length: Count
    version: Number
    """Counts what the readers were told; not the version of the rule."""
    coded: bool
    """The frame is an encoded difference to the version before; else it holds values."""


class Values(Message, tag=26):
    """Answer to a push or pull: one frame per entry where values were asked for.

    In a store that compresses pulls it is one frame per stretch told, or none when they lie in shared memory.
    """

    versions: list[Number]
    told: list[Told] = []


class MapArena(Message, tag=27):
    """Offer shared memory: the memfds of a process on the same host that hold a block's values and gradients."""

    store: Name
    block: Number
    pid: Number
    value_fd: Annotated[int, Meta(ge=-1, le=2**31)]
    """-1: the worker looks at the server's own values."""
    grad_fd: Number
    size_bytes: Count
    starts: list[Count]
    """First element inside the arena, per bucket index of the block."""


class AskValues(Message, tag=40):
    """Ask where in shared memory a server keeps the values of a block."""

    store: Name
    block: Number


class ValuesAt(Message, tag=41):
    """The memfd that holds the values of a server's buckets of a block."""

    pid: Number
    fd: Number
    starts: list[Count]
    """First element inside the file, per bucket of this server in the order of the layout; empty: there is no file."""


class GetState(Message, tag=28):
    """Ask for the optimizer state of stretches."""

    store: Name
    entries: list[Entry]


class StateItem(Message):
    """One tensor of state of one key's stretch."""

    block: Number
    bucket: Count
    start: Count
    length: Count
    name: Name
    dtype: Name
    shape: list[Count]


class SetState(Message, tag=29):
    """Set optimizer state; frames as listed."""

    store: Name
    items: list[StateItem]


class StateIs(Message, tag=30):
    """Optimizer state; one frame per item."""

    items: list[StateItem]


class Command(Message, tag=31):
    """Run a registered command on a server."""

    head: Name
    body: Text


class Answer(Message, tag=32):
    """What a command returned."""

    body: Text


class AskStats(Message, tag=33):
    """Ask for the counters of a store."""

    store: Name


class StatsAre(Message, tag=34):
    """Counters as JSON."""

    body: Text


class AskMissing(Message, tag=35):
    """Ask whom an unanswered push waits for."""

    store: Name
    entry: Entry


class Missing(Message, tag=36):
    """Workers that have not pushed, or not entered a barrier."""

    workers: list[Rank]


class Leave(Message, tag=37):
    """A worker is done with a store; nobody waits for it any more."""

    store: Name


class Pause(Message, tag=38):
    """A worker enters a barrier of a store; until all have, nobody waits for its pushes."""

    store: Name


class PullRows(Message, tag=39):
    """Ask for some rows of a key that has a bucket for itself; one frame of ascending row numbers (int64)."""

    store: Name
    entry: Entry


# ---- data: servers on behalf of workers of their host --------------------------------------------------------------


class RelayBucket(Message):
    """A bucket of a block that a server of another host owns."""

    index: Count
    length: Count
    owner: Rank


class Relay(Message, tag=42):
    """Ask a server of this host to take pushes for servers of other hosts; answered with :class:`ValuesAt`."""

    store: Name
    block: Number
    dtype: Name
    buckets: list[RelayBucket]


class Share(Message):
    """What one worker has pushed of a sum."""

    worker: Rank
    samples: float
    before_barrier: bool
    """The worker pushed this before it came to the barrier at which it may be waiting."""
    rounds: list[Number]
    """Per entry of the sum."""


class PushSum(Message, tag=43):
    """A server pushes what workers of its host have pushed, summed; one frame per entry, answered with new values."""

    store: Name
    entries: list[Entry]
    """Their rounds do not count."""
    shares: list[Share]
    unit: float
    """Where the store merges to the mean: values times this are the sum of gradients times their samples."""
    options: Blob
    """Encoded StepOptions of the optimizer; empty: unchanged."""


class OnBehalf(Message, tag=44):
    """A server passes on what a worker of its host has said, in order with the sums that it pushes."""

    worker: Rank
    body: Leave | Pause | AskMissing


# ---- common --------------------------------------------------------------------------------------------------------


class Done(Message, tag=50):
    """The request was carried out."""


class Failed(Message, tag=51):
    """The request was refused or failed; nothing has changed."""

    kind: Name
    text: Text


class Probe(Message, tag=52):
    """Ask what became of requests that got no answer."""

    seqs: Annotated[list[Number], Meta(max_length=65_536)]


class Unknown(Message, tag=53):
    """Requests that never arrived: send them again."""

    seqs: list[Number]


Request: TypeAlias = (
    Hello | Heartbeat | Bye | Claim | Enter | Publish | Lookup | AskStatus | AskAbsent
    | OpenStore | Init | SetUpdater | SetCompression | Push | Pull | MapArena | GetState | SetState
    | Command | AskStats | AskMissing | Leave | Pause | PullRows | AskValues | Relay
    | PushSum | OnBehalf | Probe
)  # fmt: skip

Reply: TypeAlias = (
    Welcome
    | News
    | Found
    | Status
    | Values
    | StateIs
    | Answer
    | StatsAre
    | Missing
    | ValuesAt
    | Done
    | Failed
    | Unknown
)

Body: TypeAlias = Request | Reply


class Envelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What every message travels in.

    A request has its sequence number, counted from 1 by the sender; its answer has the same. Sequence number 0 is
    news that nobody asked for.
    """

    seq: Number
    acked: Number
    """All requests up to here are answered; the receiver may forget them."""
    body: Body
