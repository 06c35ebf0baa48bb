"""Absent ranges in pushes and in their answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

from paceline.ranges import Ranges, is_all, joined, within, without
from paceline.wire import messages as m
from paceline.worker.block import BucketRange, WorkerBlock

Absent: TypeAlias = Sequence[tuple[WorkerBlock, BucketRange]]


def cut(entries: Sequence[m.Entry], absent: Absent) -> list[m.AbsentRange]:
    """Return the absent ranges of the entries of a push, entry by entry."""
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for block, one in absent:
        ranges.setdefault((block.spec.block, one.bucket), []).append((one.start, one.start + one.length))
    whole = {place: joined(found) for place, found in ranges.items()}
    return [
        m.AbsentRange(entry.block, entry.bucket, entry.start + start, stop - start)
        for entry in entries
        for start, stop in within(whole.get((entry.block, entry.bucket), ()), entry.start, entry.start + entry.length)
    ]


def gaps(absent: Sequence[m.AbsentRange], entry: m.Entry) -> Ranges:
    """Return the absent ranges of an entry, as positions in the entry."""
    stop = entry.start + entry.length
    found = [one for one in absent if (one.block, one.bucket) == (entry.block, entry.bucket)]
    return joined(
        (one.start - entry.start, one.start + one.length - entry.start)
        for one in found
        if entry.start <= one.start and one.start + one.length <= stop
    )


def is_whole(ranges: Ranges, entry: m.Entry) -> bool:
    """Return whether a whole entry is absent."""
    return bool(ranges) and is_all(ranges, entry.length)


@contextlib.contextmanager
def held_back(residual: torch.Tensor | None, ranges: Ranges) -> Iterator[None]:
    """Set the residuals of absent ranges to 0 inside the context, so that a codec does not add them; then restore them.

    Args:
        residual: residual of the entry, if the codec has one.
        ranges: absent ranges of the entry.
    """
    kept = [] if residual is None else [residual[start:stop].clone() for start, stop in ranges]
    parts = [] if residual is None else [residual[start:stop] for start, stop in ranges]
    for part in parts:
        part.zero_()
    try:
        yield
    finally:
        for part, before in zip(parts, kept, strict=True):
            part.copy_(before)


def note(blocks: dict[int, WorkerBlock], entries: Sequence[m.Entry], absent: Sequence[m.AbsentRange]) -> None:
    """Record the ranges of a push for which no worker had a gradient; this replaces the record of the last push."""
    if not absent and not any(block.missing for block in blocks.values()):
        return
    for entry in entries:
        missing, stop = blocks[entry.block].missing, entry.start + entry.length
        others = without(missing.get(entry.bucket, ()), entry.start, stop)
        new = [(entry.start + start, entry.start + end) for start, end in gaps(absent, entry)]
        missing[entry.bucket] = joined([*others, *new])
        if not missing[entry.bucket]:
            del missing[entry.bucket]
