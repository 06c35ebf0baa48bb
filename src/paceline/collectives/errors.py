"""Errors of collective operations."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import PacelineError


@dataclass(frozen=True)
class Interface:
    """By what a script has joined: errors speak of it.

    Attributes:
        name: its name.
        join: the call that every rank makes.
        go_on: what goes on after the end of the job.
        equalise: the call that gives all ranks the weights of rank 0.
    """

    name: str
    join: str
    go_on: str
    equalise: str


STORE = Interface("The all-reduce store", 'kvstore.create("allreduce")', "start all workers again",
                  "optimizer.broadcast_weights()")  # fmt: skip
HVD = Interface("Horovod", "hvd.init()", "call hvd.shutdown() and hvd.init() on all ranks",
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0)")  # fmt: skip


class CollectiveError(PacelineError):
    """A collective operation failed on all ranks; the text says why, and because of which rank."""


class RankEndedError(CollectiveError):
    """A rank ended during an operation."""


class NotInitializedError(CollectiveError, ValueError):
    """``hvd.init()`` has not been called: in Horovod a ValueError of ``rank`` and its like, else an internal one."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")
