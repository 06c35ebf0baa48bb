"""Compares facts that must be the same on every worker, and describes the differences. Pure."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from paceline.errors import ConfigError, KeyMismatchError, PacelineError, ProtocolError
from paceline.naming import workers_text
from paceline.wire.limits import MAX_GATHER_BYTES

#: Largest number of differences that an error lists.
MAX_LISTED = 10
#: Largest number of different documents that are compared; further ones are only counted.
MAX_VARIANTS = 8
_MAX_UNPACKED_BYTES = 64 * 1024 * 1024


class Fact(NamedTuple):
    """A fact that must be the same on all workers.

    A subject occurs once in a document: ``lr of param group 0``, ``parameter 'fc1.weight'``. The value is text.
    """

    subject: str
    value: str
    is_key: bool = False
    """The fact is about a key; its position among the keys must be the same too."""


Facts: TypeAlias = Sequence[Fact]


class Document(msgspec.Struct, frozen=True):
    """The facts of one worker.

    Attributes:
        what: name of the thing that is set up.
        facts: facts about it, in order.
    """

    what: str
    facts: list[Fact]


def pack(document: Document) -> bytes:
    """Return the bytes of a document: the same for the same facts in the same order."""
    return msgspec.msgpack.encode(document)


def digest(packed: bytes) -> bytes:
    """Return 32 bytes that differ for different documents."""
    return hashlib.sha256(packed).digest()


def representatives(digests: Sequence[bytes]) -> dict[int, list[int]]:
    """Return the ranks with the same digest, by the lowest of them, without workers that have left (no digest)."""
    ranks: dict[bytes, list[int]] = {}
    for rank, one in enumerate(digests):
        if one:
            ranks.setdefault(one, []).append(rank)
    return {same[0]: same for same in ranks.values()}


def squeeze(packed: bytes) -> bytes:
    """Compress a document for sending; empty if it is too large to be sent with the others."""
    small = zlib.compress(packed)
    return small if len(small) <= MAX_GATHER_BYTES // MAX_VARIANTS else b""


def unsqueeze(data: bytes) -> Document:
    """Return a document that another worker has sent.

    Raises:
        ProtocolError: the bytes are not a document.
    """
    try:
        packed = zlib.decompressobj().decompress(data, _MAX_UNPACKED_BYTES)
        return msgspec.msgpack.decode(packed, type=Document)
    except (zlib.error, msgspec.DecodeError) as error:
        raise ProtocolError(f"a worker's description of its model cannot be read: {error}") from error


def disagreement(documents: Mapping[int, Document], ranks: Mapping[int, Sequence[int]]) -> PacelineError:
    """Return the error that lists the differences and their workers; the same on every worker.

    Args:
        documents: different documents, by the lowest rank that has each, without those that are too large to send.
        ranks: all ranks that have the same document, by the lowest of them.
    """
    sent = {rank: ranks[rank] for rank in documents}
    whats = _by_value({rank: document.what for rank, document in documents.items()}, sent)
    if len(whats) > 1:
        lines, is_key = [f"{workers_text(who)} set up {what}" for what, who in whats.items()], False
        return _error("the setup", lines, is_key)
    tables = {rank: {fact.subject: fact for fact in document.facts} for rank, document in documents.items()}
    lines, is_key = _differences(tables, sent)
    unsent = sorted(rank for first, same in ranks.items() if first not in documents for rank in same)
    if unsent:
        lines.append(f"{workers_text(unsent)} differ too, in ways that are not compared here")
    what = next(iter(whats), "the setup")
    return _error(what, lines, is_key)


def _error(what: str, lines: Sequence[str], is_key: bool) -> PacelineError:
    shown = list(lines[:MAX_LISTED])
    if len(lines) > MAX_LISTED:
        shown.append(f"and {len(lines) - MAX_LISTED} more differences")
    text = "\n".join(
        [f"{what} differs between the workers:", *(f"  {line}" for line in shown), "All workers must use the same."]
    )
    return KeyMismatchError(text) if is_key else ConfigError(text)


def _differences(
    tables: Mapping[int, Mapping[str, Fact]], ranks: Mapping[int, Sequence[int]]
) -> tuple[list[str], bool]:
    """Return a line for each difference, and whether one of them is about a key."""
    lines, is_key = [], False
    for subject in dict.fromkeys(subject for table in tables.values() for subject in table):
        found = {rank: table[subject] for rank, table in tables.items() if subject in table}
        line = _difference(subject, found, ranks)
        if line:
            lines.append(line)
            is_key = is_key or any(fact.is_key for fact in found.values())
    order = _order(tables, ranks)
    return lines + order, is_key or bool(order)


def _difference(subject: str, found: Mapping[int, Fact], ranks: Mapping[int, Sequence[int]]) -> str:
    """Return the differences of one subject between workers; empty if there are none."""
    values = _by_value({rank: fact.value for rank, fact in found.items()}, ranks)
    without = sorted(rank for first, same in ranks.items() if first not in found for rank in same)
    if len(values) == 1 and without:
        ((value, who),) = values.items()
        sign = " " if all(fact.is_key for fact in found.values()) else " = "
        have, do = "has" if len(who) == 1 else "have", "does" if len(without) == 1 else "do"
        return f"{workers_text(who)} {have} {subject}{sign}{value}, which {workers_text(without)} {do} not have"
    if len(values) > 1:
        parts = [f"{value} on {workers_text(who)}" for value, who in values.items()]
        parts += [f"not there on {workers_text(without)}"] if without else []
        return f"{subject} is {' and '.join(parts)}"
    return ""


def _order(tables: Mapping[int, Mapping[str, Fact]], ranks: Mapping[int, Sequence[int]]) -> list[str]:
    """Return the first difference in the order of the common keys, if there is one."""
    has_key = [{subject for subject, fact in table.items() if fact.is_key} for table in tables.values()]
    common = set.intersection(*has_key) if has_key else set()
    orders = {rank: [subject for subject in table if subject in common] for rank, table in tables.items()}
    for position in range(len(common)):
        here = _by_value({rank: order[position] for rank, order in orders.items()}, ranks)
        if len(here) > 1:
            parts = " and ".join(f"{subject} on {workers_text(who)}" for subject, who in here.items())
            return [f"the order differs from position {position} on (counted from 0): it is {parts}"]
    return []


def _by_value(values: Mapping[int, str], ranks: Mapping[int, Sequence[int]]) -> dict[str, list[int]]:
    """Return the ranks that have each value, including all ranks with the same document."""
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).extend(ranks[rank])
    return {value: sorted(who) for value, who in found.items()}
