"""Between a worker and the scheduler: the samples of a pool."""

from __future__ import annotations

from typing import Annotated

import msgspec

from paceline.wire.messages.fields import (
    OF_MEMBERS,
    Count,
    Name,
    Number,
    Ranges,
    Rank,
    Reply,
    Request,
)


class TakeSamples(Request, tag=16):
    """Ask for samples of a walk through a pool, and say which are done; answered with :class:`PoolSamples`."""

    pool: Name
    length: Count
    """Samples of the data set."""
    number: Number
    """Number of this worker's request, from 1."""
    walk: Number
    """The workers' iterations of the pool, from 0."""
    count: Count
    """How many at most."""
    done: Number
    """Number of the last request whose samples were trained on; 0: none."""
    round: Number = 0
    """Last round that the worker has pushed."""
    epoch: Number = 0
    left: Ranges = msgspec.field(default_factory=list)
    """Positions of the epoch that the walk begins with; none: all."""
    limit: Count = 0
    """Samples after which the walk is over; 0: no limit."""
    order: Number = 0
    """Number of the orders; 0: not shuffled."""


class AwaitSamples(Request, tag=17):
    """Wait for the samples of the last request; answered with :class:`PoolSamples`."""

    pool: Name


class ReturnSamples(Request, tag=58):
    """Give samples back that this worker holds and will not train on; answered with :class:`Done`."""

    pool: Name
    number: Number
    """Number of the request with which it took them."""
    ranges: Ranges
    round: Number = 0
    """Last round that the worker has pushed: it has trained on all samples that it took before."""


class PoolSamples(Reply, tag=18):
    """Positions in an epoch's order that the worker now holds; none if the epoch is over, or if it has to wait."""

    ranges: Ranges
    over: bool
    waits: bool
    phase: Number
    """Generation in which the last walk of a pool has begun: a worker that was away is back for its next round."""


class AskSamples(Request, tag=60):
    """Ask for the samples of an epoch that are not trained on yet; answered with :class:`SamplesLeft`."""

    pool: Name
    round: Number = 0
    """Last round that the worker has pushed: it has trained on all samples that it took before."""


class SamplesLeft(Reply, tag=61):
    """The samples of an epoch that are not trained on yet."""

    is_known: bool
    """Whether there is such a pool; without one the other fields say nothing."""
    walk: Number = 0
    epoch: Number = 0
    left: Ranges = msgspec.field(default_factory=list)
    """Positions; none: all."""
    held: Annotated[list[tuple[Rank, Ranges, float]], OF_MEMBERS] = msgspec.field(default_factory=list)
    """Other workers that hold some of them: the positions, and the seconds since the worker got samples last."""
    first_epoch: Number = 0
    """Epoch of the walk, and the positions with which it began, as in ``TakeSamples``."""
    first_left: Ranges = msgspec.field(default_factory=list)
