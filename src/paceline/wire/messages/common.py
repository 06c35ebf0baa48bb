"""Between any two members."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from paceline.wire.messages.fields import Name, Number, Reply, Request, Text


class Done(Reply, tag=50):
    """The request was carried out."""


class Failed(Reply, tag=51):
    """The request was refused or failed, and has changed no state."""

    kind: Name
    text: Text


class Probe(Request, tag=52):
    """Ask about requests that got no answer."""

    seqs: Annotated[list[Number], Meta(max_length=65_536)]


class Unknown(Reply, tag=53):
    """Requests that never arrived: the asker sends them again."""

    seqs: list[Number]
