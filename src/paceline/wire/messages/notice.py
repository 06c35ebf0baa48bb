"""Notice: workers are asked to end their step and to leave the job, while the others go on."""

from __future__ import annotations

from typing import Annotated

import msgspec

from paceline.wire.messages.fields import (
    OF_KEYS,
    OF_MEMBERS,
    Count,
    Line,
    Message,
    Name,
    Number,
    Rank,
    Ranks,
    Reply,
    Request,
)


class Notice(Request, tag=46):
    """Ask workers to leave; answered with :class:`Noticed` when they are to. Every holder of the job's key may ask."""

    why: Line
    target: Name = ""
    """Rank of a worker, or name of a host; empty: the worker that asks."""


class Noticed(Reply, tag=47):
    """The scheduler has told these workers that they are to leave."""

    workers: Ranks
    stays: Line = ""
    """What stays on the host that was named: the job cannot go on without it."""


class GiveBack(Request, tag=48):
    """A worker that leaves says how far it has come in an epoch of a sampler; answered with :class:`Done`."""

    sampler: Name
    epoch: Number
    done: Count
    """Samples of its part that it has trained on."""
    again: Annotated[list[Number], OF_KEYS] = msgspec.field(default_factory=list)
    """Samples of others that it was to train on after its part, and has not."""


class AskGone(Request, tag=49):
    """Ask which workers are gone at a point of the loop; answered with :class:`Gone`, the same to all that ask."""

    point: Name
    sampler: Name


class GoneWorker(Message):
    """A worker that has died, or has left under notice."""

    rank: Rank
    round: Number
    """The last round that counts."""
    given: GiveBack | None = None
    """Where it was in the sampler's epochs; None: it has not said so."""


class Gone(Reply, tag=62):
    """The workers without which the others go on."""

    workers: Annotated[list[GoneWorker], OF_MEMBERS]
