"""Row-sparse pushes and pulls at the server: some rows of a key that has a bucket for itself.

The answer to a push of rows brings the merged rows of the round, or the rows of a value that changed.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Collection, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from paceline.errors import ProtocolError
from paceline.layout.tensors import from_frame, to_frame
from paceline.updaters import Piece
from paceline.updaters.rows import check_numbers, of_rows
from paceline.wire import messages as m

Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Ascending row numbers (int64), and those rows."""

_ROW_BYTES = torch.int64.itemsize

#: Updates that are remembered one by one, and how many older ones at most before they are joined.
_RECENT, _MOST_OLD = 8, 256


class RowAnswers(abc.ABC):
    """The answers of a bucket of one key to pushes of its rows.

    Attributes:
        stores_value: the bucket holds the key's value, which updates change.
    """

    stores_value: bool

    @abc.abstractmethod
    def note(self, version: int, gradient: torch.Tensor, scale: float, only_rows: bool) -> None:
        """Note an update.

        Args:
            version: version after the update.
            gradient: merged: row-sparse and coalesced, or flat.
            scale: factor that makes it the gradient.
            only_rows: the update touched nothing but the gradient's rows.
        """

    def note_nothing(self) -> None:  # noqa: B027 - most have nothing to do
        """Note that a round ends, with or without an update."""

    def overwritten(self) -> None:  # noqa: B027
        """Note that the value was set, outside of any round."""

    @abc.abstractmethod
    def take(self, worker: int, version: int, values: torch.Tensor) -> Rows | None:
        """Return the rows that a worker, which reads now, lacks.

        Args:
            worker: rank of the worker.
            version: version that it reads.
            values: values of that version, [rows, elements of a row].
        """

    def leave(self, worker: int) -> None:  # noqa: B027
        """Forget a worker."""


class MergedRows(RowAnswers):
    """Brings the merged rows of the last round. No value is stored: a table of any size takes no memory here."""

    stores_value = False

    def __init__(self) -> None:
        self._rows: Rows | None = None

    def note_nothing(self) -> None:
        """Forget the round before."""
        self._rows = None

    def note(self, version: int, gradient: torch.Tensor, scale: float, only_rows: bool) -> None:
        """Keep the merged rows until the next round."""
        values = gradient.values()
        self._rows = gradient.indices()[0].contiguous(), (values if scale == 1.0 else values * scale).contiguous()

    def take(self, worker: int, version: int, values: torch.Tensor) -> Rows | None:
        """Return the merged rows, the same for every worker; None: no worker had a gradient."""
        return self._rows


class ChangedRows(RowAnswers):
    """Brings the rows that changed since a worker last read. Remembers no more than it needs for that.

    Args:
        height: rows of the value.
        workers: workers that read; all of them know version 0.
    """

    stores_value = True

    def __init__(self, height: int, workers: Collection[int]) -> None:
        self._height = height
        self._read = dict.fromkeys(workers, 0)
        self._outdated: set[int] = set()
        """Workers that get all rows next time: the value was set since they read."""
        self._log: list[tuple[int, torch.Tensor | None]] = []
        """Versions in order, each with the rows that it changed; None: all rows."""

    def note(self, version: int, gradient: torch.Tensor, scale: float, only_rows: bool) -> None:
        """Remember which rows changed."""
        rows = gradient.indices()[0] if gradient.is_sparse and only_rows else None
        self._log.append((version, rows))
        self._shorten()

    def overwritten(self) -> None:
        """Give every worker all rows next time."""
        self._outdated = set(self._read)

    def take(self, worker: int, version: int, values: torch.Tensor) -> Rows | None:
        """Return the rows that changed since the worker read, as they are now."""
        before = self._read.get(worker, 0)
        rows = self._union([one for one in self._log if before < one[0]]) if worker not in self._outdated else None
        self._outdated.discard(worker)
        if worker in self._read:
            self._read[worker] = version
            self._forget()
        if rows is None:
            return torch.arange(self._height, device="cpu"), values.clone()
        return rows, values[rows]

    def leave(self, worker: int) -> None:
        """Keep nothing for a worker any more."""
        self._read.pop(worker, None)
        self._forget()

    def _shorten(self) -> None:
        """Join the updates that only slow readers still need; these get some rows once more than necessary."""
        old = self._log[:-_RECENT]
        size = sum(self._height if rows is None else rows.numel() for _, rows in old)
        if len(old) > _MOST_OLD or size > 2 * self._height:
            self._log[:-_RECENT] = [(old[-1][0], self._union(old))]

    def _forget(self) -> None:
        slowest = min(self._read.values(), default=0)
        self._log = [one for one in self._log if one[0] > slowest]

    def _union(self, entries: Collection[tuple[int, torch.Tensor | None]]) -> torch.Tensor | None:
        changed = [rows for _, rows in entries if rows is not None]
        if len(changed) < len(entries):
            return None
        if len(changed) == 1:
            return changed[0]
        return torch.unique(torch.cat(changed)) if changed else torch.empty(0, dtype=torch.int64, device="cpu")


# ---- rows of a bucket ------------------------------------------------------------------------------------------------


class Table(Protocol):
    """A bucket whose only key has rows."""

    values: torch.Tensor
    pieces: tuple[Piece, ...]
    answers: RowAnswers | None

    @property
    def slots(self) -> Sequence[object]:
        """One, if the bucket is not cut."""


def shape_of(bucket: Table, entry: m.Entry) -> tuple[int, int]:
    """Return the rows of a bucket and the elements of each.

    Raises:
        ProtocolError: the bucket is not one whole key with rows, or the entry is not all of it.
    """
    shape, width = _table(bucket)
    if len(shape) < 2 or width == 0:
        raise ProtocolError("rows belong to a key of two or more dimensions that has a bucket for itself")
    if (entry.start, entry.length) != (0, bucket.values.numel()) or len(bucket.slots) > 1:
        raise ProtocolError("rows are pushed and pulled as an entry of the whole bucket")
    return shape[0], width


def _table(bucket: Table) -> tuple[tuple[int, ...], int]:
    """Return the shape of a bucket's only key, or nothing, and the elements of a row."""
    shape = bucket.pieces[0].shape if len(bucket.pieces) == 1 else ()
    return shape, math.prod(shape[1:])


def answers_of(bucket: Table, kind: str, workers: Collection[int]) -> RowAnswers | None:
    """Return the answers of a new bucket to pushes of its rows.

    Raises:
        ProtocolError: unknown kind, or the bucket is not one whole key with rows.
    """
    if not kind:
        return None
    shape, width = _table(bucket)
    if kind not in ("merged", "changed") or len(shape) < 2:
        raise ProtocolError(f"no bucket of shape {shape} brings {kind!r} rows")
    if bucket.values.numel() != (1 if kind == "merged" else shape[0] * width):
        raise ProtocolError(f"{bucket.values.numel()} elements for {kind} rows of shape {shape}")
    return MergedRows() if kind == "merged" else ChangedRows(shape[0], workers)


def taken(bucket: Table, worker: int, version: int, values: torch.Tensor) -> list[Any]:
    """Return the frames of the rows that are new to a worker, which reads now."""
    assert bucket.answers is not None
    shape, width = _table(bucket)
    held = values.view(shape[0], width) if bucket.answers.stores_value else values
    found = bucket.answers.take(worker, version, held)
    return [] if found is None else [to_frame(found[0]), to_frame(found[1])]


def numbers(bucket: Table, entry: m.Entry, frame: Any) -> torch.Tensor:
    """Return the row numbers in a frame.

    Raises:
        ProtocolError: they do not ascend, or are not rows of the bucket.
    """
    height, _ = shape_of(bucket, entry)
    rows = from_frame(frame, torch.int64, memoryview(frame).nbytes // _ROW_BYTES)
    check_numbers(rows, height)
    return rows


def pushed(bucket: Table, entry: m.Entry, frames: tuple[Any, Any]) -> torch.Tensor:
    """Return pushed rows as a sparse tensor [rows, elements of a row] over the memory of the frames.

    Raises:
        ProtocolError: the frames do not fit the bucket, or each other.
    """
    shape, rows = shape_of(bucket, entry), numbers(bucket, entry, frames[0])
    values = from_frame(frames[1], bucket.values.dtype, rows.numel() * shape[1]).view(-1, shape[1])
    return of_rows(rows, values, shape)
