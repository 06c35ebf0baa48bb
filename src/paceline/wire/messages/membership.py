"""Between any member and the scheduler."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from paceline.wire.limits import (
    MAX_BINS,
    MAX_FIGURES,
    MAX_MEMBERS,
    MAX_NUMEL,
    MAX_PARTS,
    MAX_REPORTS,
    MAX_TOLD_STEPS,
    MAX_WINDOWS,
)
from paceline.wire.messages.changes import Dealt
from paceline.wire.messages.fields import (
    OF_KEYS,
    OF_MEMBERS,
    Amount,
    Count,
    Counts,
    Digest,
    FigureName,
    Finite,
    Groups,
    HostName,
    KeyName,
    Letter,
    Line,
    Message,
    Microseconds,
    Name,
    Number,
    Rank,
    Ranks,
    Reply,
    Request,
    Role,
    Saying,
    Shape,
    Text,
)
from paceline.wire.messages.rejoining import Rejoined, TakenIn
from paceline.wire.messages.tracing import TraceEvents


class Hello(Request, tag=1):
    """Join the job."""

    job_id: Name
    role: Role
    rank: Rank
    local_rank: Rank
    host: HostName
    host_id: HostName
    pid: Number
    address: Name
    """Where a server listens for workers; empty for workers."""
    num_workers: Rank
    num_servers: Rank
    speed: Amount = 0.0
    """Elements that a server sums and applies in a second; 0: not measured."""
    incarnation: Number = 0
    """How many processes have had this rank before, in this start of the job."""


class Member(Message):
    """A process of the job, as the scheduler knows it."""

    role: Role
    rank: Rank
    local_rank: Rank
    host: HostName
    host_id: HostName
    pid: Number
    address: Name
    token: Digest
    """Proves to a server that a connection belongs to this member."""
    speed: Amount = 0.0
    """As in its ``Hello``."""
    incarnation: Number = 0
    """As in its ``Hello``."""


class Welcome(Reply, tag=2):
    """All members are there: the rank of the new member, and all members."""

    rank: Rank
    members: Annotated[list[Member], OF_MEMBERS]
    scheduler_pid: Number = 0
    """Process id of the scheduler; 0: not known."""
    scheduler_host_id: Name = ""


class SilentMember(Message):
    """A silent member; the receiver on the same host is to look at its process."""

    role: Role
    rank: Rank
    pid: Number


class Sighting(Message):
    """The kernel's word on the process of a suspect."""

    role: Role
    rank: Rank
    state: Letter
    """Letter as in /proc/PID/stat; X: there is no such process; empty: not known."""
    cpu_s: Amount = 0.0
    """CPU time that it has used."""


class Spread(Message):
    """How much the times of a worker's last steps vary."""

    steps: Number = 0
    """Steps that were counted."""
    spikes: Number = 0
    """Those of them that took several times as long as those around them."""
    spike_factor: Amount = 1.0
    """How many times, in the mean."""
    jitter: Amount = 0.0
    """Sigma of the logarithm of the others."""


class Window(Message):
    """Account of some rounds of a worker, or of a while of a server."""

    round: Number
    """The first round."""
    rounds: Count
    samples: Amount
    """Of a server: updates."""
    parts: Annotated[list[Microseconds], Meta(max_length=MAX_PARTS)]
    """Microseconds by part: see :mod:`paceline.observe.account`."""
    way: Microseconds = 0
    """Of a worker: microseconds of its waits in which a request or its answer was on the way."""


class AccountReport(Message):
    """The account of a process since its last heartbeat."""

    windows: Annotated[list[Window], Meta(max_length=MAX_WINDOWS)] = msgspec.field(default_factory=list)
    host: Annotated[list[Microseconds], Meta(max_length=MAX_PARTS)] = msgspec.field(default_factory=list)
    """Figures of the kernel: see :mod:`paceline.observe.host`."""
    late: Annotated[list[tuple[Rank, Count, Microseconds]], Meta(max_length=MAX_MEMBERS)] = msgspec.field(
        default_factory=list
    )
    """From a server: workers that came last to cohorts, how often, and microseconds after the others in all."""
    group: Number = 0
    """Number of a worker's group, from 1; 0: all workers step alike."""
    staleness: Annotated[list[tuple[Number, Count]], Meta(max_length=MAX_BINS)] = msgspec.field(default_factory=list)
    """From a server: how many updates had which staleness."""
    held: tuple[Count, Count] = (0, 0)
    """From a server: its values, and the buckets that they are in."""
    is_ddp: bool = False
    """The rounds of a worker are those of a DDP script: all workers wait for each other, and servers merge nothing."""
    is_shared: bool = False
    """Samples go to workers by their speed already."""
    is_local: bool = False
    """A round of a worker is a period of local steps."""


class ReportedFigures(Message):
    """Figures that the script of a worker reports of one step, or of some steps together."""

    step: Number
    samples: Annotated[float, Meta(ge=0, le=MAX_NUMEL)]
    """Samples behind the figures: their weight among those of the other workers."""
    figures: Annotated[dict[FigureName, Finite], Meta(max_length=MAX_FIGURES)]


class StepsLeft(Message):
    """How far the script of a worker is."""

    step: Number
    total: Number
    left_s: Amount | None = None
    """Seconds that it still takes; None: not known yet."""


Way = Literal["", "given", "inputs", "dealt", "loss", "equal", "unknown", "sum", "each"]
"""How a worker weighs: see :mod:`paceline.membership.weighing`. Empty: it has no samples."""


class StepBatch(Message):
    """The batch of a worker in one step, and how it weighs."""

    way: Way
    samples: Annotated[float, Meta(ge=0, le=MAX_NUMEL)] = 0.0
    """The weight of the worker."""
    rows: Annotated[float, Meta(ge=0, le=MAX_NUMEL)] = 0.0
    """How many samples there may be."""
    loss: Finite | None = None
    """Sum of the losses whose gradients it has; None: not known."""
    shapes: Line = ""
    """Of the model's inputs, where the number of samples is not known; empty: not known either."""
    why: Line = ""
    """Why the number of samples is not known."""


class WorkerStep(Message):
    """What a worker tells of one of its steps, for the comparison with other workers."""

    store: Name
    step: Number
    sums: Annotated[list[tuple[Name, float, float]], OF_KEYS] = msgspec.field(default_factory=list)
    """Of each parameter its name, the sum of its weights, and by how much rounding may have changed that."""
    batch: StepBatch | None = None


class Heartbeat(Request, tag=3):
    """A member is alive, and has reached this round; with its memory and network traffic in bytes."""

    round: Number
    seen: Annotated[list[Sighting], Meta(max_length=MAX_MEMBERS)] = msgspec.field(default_factory=list)
    """Suspects of the last news."""
    memory: Number = 0
    sent: Number = 0
    received: Number = 0
    taken_out: Annotated[list[tuple[Rank, Number]], Meta(max_length=MAX_MEMBERS)] = msgspec.field(default_factory=list)
    """From a server: dead workers that it waits for no more, each with its last round there."""
    step_s: Amount = 0.0
    """Seconds that a worker computes in a step; 0: not known."""
    usual_s: Amount = 0.0
    """Median of that over its last rounds; 0: not known."""
    usual_samples: Amount = 1.0
    """Samples of the step that ``usual_s`` is of."""
    spread: Spread = msgspec.field(default_factory=Spread)
    """How much a worker's steps vary."""
    account: AccountReport = msgspec.field(default_factory=AccountReport)
    """The parts of its time since the last heartbeat."""
    steps: Annotated[list[WorkerStep], Meta(max_length=MAX_TOLD_STEPS)] = msgspec.field(default_factory=list)
    """What a worker tells of some of the steps since its last heartbeat."""
    reports: Annotated[list[ReportedFigures], Meta(max_length=MAX_REPORTS)] = msgspec.field(default_factory=list)
    """Figures of the worker's script since the last heartbeat."""
    progress: StepsLeft | None = None
    """None: the script has told no total of steps."""
    trace: TraceEvents | None = None
    """Events since the last heartbeat, while a trace is made."""
    dealt: Annotated[list[Dealt], Meta(max_length=MAX_WINDOWS)] = msgspec.field(default_factory=list)
    """Samples that were dealt since the last heartbeat."""
    taken_in: Annotated[list[TakenIn], OF_MEMBERS] = msgspec.field(default_factory=list)
    """From a server: members that are not the first of their rank, as it knows them."""
    work: Number = 0
    """Steps of its optimizer, and parts of tensors that it has sent or received: it gets on while this grows."""


class Death(Message):
    """A member that the job has lost."""

    role: Role
    rank: Rank
    host: HostName
    reason: Text
    incarnation: Number = 0
    """Which process of this rank it was."""


class News(Reply, tag=4):
    """The scheduler's answer to a heartbeat; also sent unasked when something happens."""

    deaths: Annotated[list[Death], OF_MEMBERS]
    shutdown: bool
    """All workers have left; servers exit."""
    left: Ranks = msgspec.field(default_factory=list)
    """Ranks of the workers that have left. Servers wait for them no more, in any store."""
    suspects: Annotated[list[SilentMember], OF_MEMBERS] = msgspec.field(default_factory=list)
    """Silent members on the receiver's host."""
    lost: Annotated[list[Death], OF_MEMBERS] = msgspec.field(default_factory=list)
    """Workers that have died, and that the job goes on without; they are among ``left`` too."""
    generation: Number = 0
    """Generation in which the groups have changed last; 0: they are those of the start."""
    groups: Groups = msgspec.field(default_factory=list)
    """The groups that fit the measured speeds since then."""
    at: Amount = 0.0
    """In an answer: the scheduler's clock."""
    trace: Number = 0
    """Number of the trace for which heartbeats bring events; 0: none."""
    fastest_s: Amount = 0.0
    """In an answer: seconds of a step of the fastest worker; 0: not known."""
    leave: Line = ""
    """Why the receiver is to end its step and leave; empty: it is not."""
    number: Number = 0
    """The newest generation: older news say nothing about who is there."""
    joiners: Ranks = msgspec.field(default_factory=list)
    """To workers: replacements that wait to be let in."""
    came: Annotated[list[Member], OF_MEMBERS] = msgspec.field(default_factory=list)
    """To servers: members that are not the first of their rank."""
    rejoined: Annotated[list[Rejoined], OF_MEMBERS] = msgspec.field(default_factory=list)
    """To servers: those of them that count."""


class Bye(Request, tag=5):
    """Leave the job; with a reason it is a failure and ends the job for all."""

    reason: Text
    round: Number = 0
    """Last round of a worker."""


class Claim(Request, tag=6):
    """Say which member a further connection belongs to."""

    role: Role
    rank: Rank
    token: Digest
    incarnation: Number = 0


class Enter(Request, tag=7):
    """Enter a barrier; answered when every live worker has, or those that have not left its store.

    The answer is :class:`Gathered`, without payloads, when workers have left or died, or not all of them pause.
    """

    barrier: Name
    store: Name = ""
    """The store whose barrier it is; empty: the job's."""
    round: Number = 0
    """Last round that the worker has pushed: it has trained on all samples that it took from pools before."""
    pauses: bool = False
    """The servers know that the worker pauses: it has opened the store there."""


class KeySpec(Message):
    """Name, shape and tag of a key."""

    name: KeyName
    shape: Shape
    tag: Number


class BlockSpec(Message):
    """The keys of one dtype that one call initialised, and the inputs of their placement."""

    block: Number
    dtype: Name
    keys: Annotated[list[KeySpec], OF_KEYS]
    loads: Counts
    speeds: Annotated[list[Amount], OF_MEMBERS]
    bound: Count
    policy: Name
    whole: bool
    rows: bool = False
    """Keys whose pushes may be rows; these go to their owner directly."""
    largest: Count = 0
    """Elements of the largest bucket; 0: the bound."""
    answers: Name = ""
    """Rows in the answer to a push of rows: as in ``Init``."""


class Publish(Request, tag=8):
    """Rank 0 publishes where keys are."""

    store: Name
    blocks: Annotated[list[BlockSpec], OF_KEYS]
    goes_on: bool = False
    """The workers can go on if one of them dies."""
    auto: Name = ""
    """``free``: the store is ``dist_auto``, and its workers can change groups; ``fixed``: they cannot."""


class Lookup(Request, tag=9):
    """Ask where keys are; answered when all of them are published. No keys: ask for all that are published."""

    store: Name
    keys: Annotated[list[KeyName], OF_KEYS]


class Found(Reply, tag=10):
    """The blocks that hold the keys asked for."""

    blocks: Annotated[list[BlockSpec], OF_KEYS]


class AskAbsent(Request, tag=13):
    """Ask for the workers that have not entered a barrier or joined a gather yet; answered with :class:`Missing`."""

    barrier: Name


class Gather(Request, tag=14):
    """Send something to all workers; answered with :class:`Gathered` when every live worker has sent its part.

    A gather is a barrier to which members bring something. Its name is that of the barrier.
    """

    barrier: Name
    payload: Saying
    round: Number = 0
    """Last round that the worker has pushed; it is answered."""
    lets_in: bool = False
    """All workers are between the same two rounds here, so that others can be let in."""
    why_shut: Line = ""
    """Why nobody may be let in nevertheless."""


class Gathered(Reply, tag=15):
    """The bytes that every worker sent, by rank; empty for a worker that had left or died before."""

    payloads: Annotated[list[Saying], OF_MEMBERS]
    gone: Annotated[list[tuple[Rank, Number]], OF_MEMBERS] = msgspec.field(default_factory=list)
    """The workers that have left or died, each with its last round."""
    dead: Ranks = msgspec.field(default_factory=list)
    """Those of them that have died, or left under notice."""
    mixed: bool = False
    """Some of the workers pause at the servers, and some do not: the servers' barrier does not open."""
    came: Ranks = msgspec.field(default_factory=list)
    """Replacements that count from the next round on."""
    phase: Number = 0
    """The phase in which they step with the others."""
