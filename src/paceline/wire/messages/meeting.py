"""Between workers of a process group of torch.distributed, by way of a server."""

from __future__ import annotations

from typing import Annotated

from paceline.wire.messages.fields import (
    OF_NAMES,
    Blob,
    Name,
    Number,
    Ranks,
    Reply,
    Request,
)


class Meet(Request, tag=90):
    """Give frames to members of a group, and get theirs, once all of them have come; one frame per entry of ``to``."""

    group: Name
    number: Number
    members: Ranks
    """Ranks of the workers; the same for all that meet."""
    what: Name
    """The operation. Members that name unlike ones all get an error."""
    to: Ranks
    """Rank of the member that gets the frame; -1: all others."""


class Met(Reply, tag=91):
    """Answer to :class:`Meet` and :class:`TakeAny`."""

    senders: Ranks
    """Rank of the worker that gave each frame."""


class TakeAny(Request, tag=92):
    """Join the first meeting of two of a group, whoever the other one is."""

    group: Name


class AskNotMet(Request, tag=93):
    """Ask which members have not come to a meeting."""

    group: Name
    number: Number
    members: Ranks


class GiveUp(Request, tag=97):
    """Wait no more in a group: a deadline has passed. Others that meet this worker there get an error."""

    group: Name


class UseBoard(Request, tag=94):
    """Use a board: texts by name, with which the processes of torch.distributed find each other."""

    verb: Name
    """``set``, ``get`` (waits until all exist), ``add``, ``swap``, ``check``, ``delete``, ``count``, ``forget``
    (this worker waits no more for exactly these names)."""
    names: Annotated[list[Name], OF_NAMES]
    values: Annotated[list[Blob], OF_NAMES]


class BoardIs(Reply, tag=95):
    """Answer to :class:`UseBoard`."""

    values: Annotated[list[Blob], OF_NAMES]
    number: int = 0
