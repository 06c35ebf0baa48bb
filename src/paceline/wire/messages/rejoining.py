"""Replacement: another process takes the rank of a worker that has died, while the others train."""

from __future__ import annotations

from paceline.wire.messages.fields import Message, Number, Rank, Reply, Request


class Rejoined(Message):
    """A replacement that counts."""

    rank: Rank
    phase: Number
    """Phase in which it steps with the others: the generation in which it has joined."""
    round: Number
    """The job's last round before; its own rounds count from 1."""


class TakenIn(Message):
    """A replacement that a server knows."""

    rank: Rank
    incarnation: Number
    counts: bool
    """Its pushes count there."""


class Join(Request, tag=63):
    """A replacement's script has come to its loop; answered with :class:`Joined` when it counts."""


class Joined(Reply, tag=64):
    """A replacement counts from the next round on."""

    phase: Number
    round: Number
    """The job's last round before."""
    giver: Rank
    """The worker that gives its state; -1: nobody needs to."""
