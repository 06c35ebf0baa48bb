"""Between any two members."""

from __future__ import annotations

from typing import Annotated

from paceline.wire.messages.fields import (
    OF_MEMBERS,
    Name,
    Number,
    Reply,
    Request,
    Text,
)


class Done(Reply, tag=50):
    """The request was carried out."""


class Failed(Reply, tag=51):
    """The request was refused or failed, and has changed no state."""

    kind: Name
    text: Text


class Probe(Request, tag=52):
    """Ask about requests that got no answer."""

    seqs: Annotated[list[Number], OF_MEMBERS]


class Unknown(Reply, tag=53):
    """Requests that never arrived: the asker sends them again."""

    seqs: Annotated[list[Number], OF_MEMBERS]
