"""Between workers of a process group of torch.distributed, by way of a server."""

from __future__ import annotations

from paceline.wire.messages.fields import Blob, Name, Number, Rank, Reply, Request


class Meet(Request, tag=90):
    """Give frames to members of a group, and get theirs, once all of them have come; one frame per entry of ``to``."""

    group: Name
    number: Number
    members: list[Rank]
    """Ranks of the workers; the same for all that meet."""
    what: Name
    """The operation. Members that name unlike ones all get an error."""
    to: list[Rank]
    """Rank of the member that gets the frame; -1: all others."""


class Met(Reply, tag=91):
    """Answer to :class:`Meet` and :class:`TakeAny`."""

    senders: list[Rank]
    """Rank of the worker that gave each frame."""


class TakeAny(Request, tag=92):
    """Join the first meeting of two of a group, whoever the other one is."""

    group: Name


class AskNotMet(Request, tag=93):
    """Ask which members have not come to a meeting."""

    group: Name
    number: Number
    members: list[Rank]


class UseBoard(Request, tag=94):
    """Use a board: texts by name, with which the processes of torch.distributed find each other."""

    verb: Name
    """``set``, ``get`` (waits until all exist), ``add``, ``swap``, ``check``, ``delete`` or ``count``."""
    names: list[Name]
    values: list[Blob]


class BoardIs(Reply, tag=95):
    """Answer to :class:`UseBoard`."""

    values: list[Blob]
    number: int = 0
