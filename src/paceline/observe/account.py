"""The account of a step: its parts, which sum up to the step. Pure.

A step of a worker lasts from the first push of one round to the first push of the next. Its parts:

| part | begins | ends |
|---|---|---|
| ``data`` | a data loader is asked for a batch | the batch is there |
| ``compute`` | the forward pass of the optimizer's model begins | backward is over, less the parts below |
| ``device`` | the exchange waits for gradients of an accelerator | they are in host memory |
| ``encode`` | a codec encodes gradients | they are encoded |
| ``send`` | a push is made | it is handed over to the connection |
| ``wait`` | the worker waits for answers | they are there |
| ``copy`` | new values are copied to the parameters | they are copied |
| ``update`` | the optimizer steps in the worker | it has stepped |
| ``gc`` | Python collects garbage in the thread that trains | it has collected |
| ``other`` | the optimizer's step returns | the next forward pass begins, less ``data`` |

Without a model whose forward pass is watched, ``other`` is a part of ``compute``. A server's account has the parts
:data:`SERVER_PARTS`.

Of a DDP script a step lasts from one step of its optimizer to the next, and ``wait`` are its collective operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

#: Parts of a worker's step, in the order in which heartbeats carry them.
WORKER_PARTS = ("data", "compute", "device", "encode", "send", "wait", "copy", "update", "gc", "other")
DATA, COMPUTE, DEVICE, ENCODE, SEND, WAIT, COPY, UPDATE, GC, OTHER = range(len(WORKER_PARTS))

#: Parts of a server's time: it waits for messages and reads them, sums, updates, or does the rest. ``gc`` as above.
SERVER_PARTS = ("receive", "merge", "apply", "gc", "rest")
RECEIVE, MERGE, APPLY, SERVER_GC, REST = range(len(SERVER_PARTS))


def parts_of(role: str) -> tuple[str, ...]:
    """Return the parts of the time of a process."""
    return WORKER_PARTS if role == "worker" else SERVER_PARTS


#: Figures of the host in the order in which heartbeats carry them, see :mod:`paceline.observe.host`: microseconds since
#: the last one; ``faults`` and ``reread`` are numbers.
FIGURES = ("interval", "busy", "queued", "throttled", "stolen", "stalled", "faults", "stopped", "reread")
INTERVAL, BUSY, QUEUED, THROTTLED, STOLEN, STALLED, FAULTS, STOPPED, REREAD = range(len(FIGURES))


@dataclass(slots=True)
class Steps:
    """The account of some rounds that follow each other.

    Attributes:
        round: the first one.
        rounds: how many.
        samples: behind their pushes.
        seconds: by part.
        way_s: seconds of a worker's waits in which a request or its answer was on the way.
        steps: local steps in them; 0: each round is one step.
    """

    round: int
    rounds: int
    samples: float
    seconds: list[float]
    way_s: float = 0.0
    steps: int = 0

    @property
    def wall_s(self) -> float:
        """Seconds of all rounds."""
        return sum(self.seconds)


def joined(steps: Sequence[Steps]) -> Steps:
    """Return the account of all rounds together; there is at least one."""
    seconds = [sum(part) for part in zip(*(one.seconds for one in steps), strict=True)]
    columns = zip(*((one.rounds, one.samples, one.way_s, one.steps) for one in steps), strict=True)
    rounds, samples, way_s, taken = map(sum, columns)
    return Steps(steps[0].round, rounds, samples, seconds, way_s, taken)


def in_windows(steps: Sequence[Steps], most: int) -> list[Steps]:
    """Return the same account in at most so many windows of about as many rounds each."""
    count = min(most, len(steps))
    bounds = [len(steps) * index // count for index in range(count + 1)] if count else [0]
    return [joined(steps[start:stop]) for start, stop in pairwise(bounds)]
