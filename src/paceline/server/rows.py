"""Row-sparse pushes and pulls at the server: some rows of a key that has a bucket for itself."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from paceline.errors import ProtocolError
from paceline.server.bucket import StoredBucket
from paceline.server.row_answers import ChangedRows, MergedRows, RowAnswers
from paceline.tensors import from_frame, to_frame
from paceline.wire import messages as m

_ROW_BYTES = torch.int64.itemsize


def shape_of(bucket: StoredBucket, entry: m.Entry) -> tuple[int, int]:
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


def _table(bucket: StoredBucket) -> tuple[tuple[int, ...], int]:
    """Return the shape of a bucket's only key, or nothing, and the elements of a row."""
    shape = bucket.pieces[0].shape if len(bucket.pieces) == 1 else ()
    return shape, math.prod(shape[1:])


def answers_of(bucket: StoredBucket, kind: str, workers: Collection[int]) -> RowAnswers | None:
    """Return what a new bucket answers to pushes of its rows.

    Args:
        bucket: the bucket.
        kind: as in :class:`paceline.wire.messages.Init`.
        workers: that read it.

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


def taken(bucket: StoredBucket, worker: int, version: int, values: torch.Tensor) -> list[Any]:
    """Return the frames of the rows that are new to a worker, which reads now."""
    assert bucket.answers is not None
    shape, width = _table(bucket)
    held = values.view(shape[0], width) if bucket.answers.stores_value else values
    found = bucket.answers.take(worker, version, held)
    return [] if found is None else [to_frame(found[0]), to_frame(found[1])]


def numbers(bucket: StoredBucket, entry: m.Entry, frame: Any) -> torch.Tensor:
    """Return the row numbers in a frame.

    Raises:
        ProtocolError: they do not ascend, or are not rows of the bucket.
    """
    height, _ = shape_of(bucket, entry)
    rows = from_frame(frame, torch.int64, memoryview(frame).nbytes // _ROW_BYTES)
    if rows.numel() and (int(rows[0]) < 0 or int(rows[-1]) >= height or not bool((rows[1:] > rows[:-1]).all())):
        raise ProtocolError(f"row numbers must ascend from 0 or more to less than {height}")
    return rows


def pushed(bucket: StoredBucket, entry: m.Entry, frames: tuple[Any, Any]) -> torch.Tensor:
    """Return pushed rows as a sparse tensor [rows, elements of a row] over the memory of the frames.


    Raises:
        ProtocolError: the frames do not fit the bucket, or each other.
    """
    shape, rows = shape_of(bucket, entry), numbers(bucket, entry, frames[0])
    values = from_frame(frames[1], bucket.values.dtype, rows.numel() * shape[1]).view(-1, shape[1])
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)
