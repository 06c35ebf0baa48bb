"""The content of answers: values, and the ranges for which no worker had a gradient (*absent* in a push)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from paceline.compression import Codec
from paceline.errors import ConfigError, ProtocolError
from paceline.layout.ranges import Ranges, joined, within
from paceline.layout.tensors import from_frame
from paceline.net.base import Frames
from paceline.wire import messages as m
from paceline.worker.block import WorkerBlock

Blocks: TypeAlias = Mapping[int, WorkerBlock]


def store_values(blocks: Blocks, entries: Sequence[m.Entry], frames: Frames) -> None:
    """Store one frame of values per requested entry.

    Raises:
        ProtocolError: a frame has another size.
    """
    for entry, frame in zip(entries, frames, strict=True):
        block = blocks[entry.block]
        part = block.arena_slice(entry)
        block.values[part].copy_(from_frame(frame, block.dtype, entry.length))


def store_known(
    blocks: Blocks,
    entries: Sequence[m.Entry],
    shared: bool,
    codec: Codec | None,
    known: Sequence[m.KnownRange],
    frames: Frames,
) -> None:
    """Store the answer of a server that compresses pulls. Ranges that have this version already are not changed.

    There is one frame for each range of the answer, unless the server has written the values in place (``shared``).

    Raises:
        ConfigError: the answer holds a difference, but this worker has no codec for it.
        ProtocolError: the answer has ranges that were not requested, a frame has a wrong size or invalid content, or an
            earlier difference is missing; then a plain pull gets the values.
    """
    _check_requested(entries, known)
    if not shared and len(frames) != len(known):
        raise ProtocolError(f"an answer about {len(known)} ranges has {len(frames)} frames")
    for one, frame in zip(known, [None] * len(known) if shared else frames, strict=True):
        block = blocks[one.block]
        versions = block.buckets[one.bucket].versions
        stop = one.start + one.length
        held = set(versions.touched(one.start, stop)) if one.length else set()
        if shared or _is_new(one, held):
            if not shared:
                _store(block, one, codec, frame)
            versions.put(one.start, stop, one.version)


def _check_requested(entries: Sequence[m.Entry], known: Sequence[m.KnownRange]) -> None:
    requested: dict[tuple[int, int], list[m.Entry]] = {}
    for entry in entries:
        requested.setdefault((entry.block, entry.bucket), []).append(entry)
    for one in known:
        stop = one.start + one.length
        if not any(
            e.start <= one.start and stop <= e.start + e.length for e in requested.get((one.block, one.bucket), ())
        ):
            raise ProtocolError(
                f"an answer holds elements {one.start} to {stop} of bucket {one.bucket} of block {one.block}, "
                "which were not requested"
            )


def _is_new(one: m.KnownRange, held: set[int]) -> bool:
    """Return whether a version is new to this worker. It is not if a later answer was handled first."""
    newest = max(held, default=0)
    if one.coded and one.version > newest and held and held != {one.version - 1}:
        raise ProtocolError(
            f"elements {one.start} to {one.start + one.length} of bucket {one.bucket} of block {one.block} should "
            f"move to version {one.version}, but this worker holds {sorted(held)}; pull their keys to get the values"
        )
    return one.version > newest or (one.version == newest and not one.coded)


def _store(block: WorkerBlock, one: m.KnownRange, codec: Codec | None, frame: Any) -> None:
    values = block.values[block.arena_slice(one)]
    if not one.coded:
        values.copy_(from_frame(frame, block.dtype, one.length))
    elif codec is None:
        raise ConfigError(
            "the servers compress pulls, but this worker does not: every worker calls set_gradient_compression with "
            "the same settings before its first push"
        )
    else:
        codec.decode_add(frame, values)


# ---- ranges without a gradient ---------------------------------------------------------------------------------------


def cut(entries: Sequence[m.Entry], absent: Sequence[m.Span]) -> list[m.Span]:
    """Return the absent ranges of the entries of a push, entry by entry."""
    return [
        m.Span(*entry.place, entry.start + start, stop - start)
        for entry in entries
        for start, stop in gaps(absent, entry)
    ]


def gaps(absent: Sequence[m.Span], entry: m.Entry) -> Ranges:
    """Return the absent ranges of an entry, as positions in the entry."""
    ranges = joined((one.start, one.stop) for one in absent if one.place == entry.place)
    return within(ranges, entry.start, entry.stop)


@contextlib.contextmanager
def held_back(residual: torch.Tensor | None, ranges: Ranges) -> Iterator[None]:
    """Set the residuals of absent ranges to 0 inside the context, so that a codec does not add them."""
    kept = [] if residual is None else [residual[start:stop].clone() for start, stop in ranges]
    parts = [] if residual is None else [residual[start:stop] for start, stop in ranges]
    for part in parts:
        part.zero_()
    try:
        yield
    finally:
        for part, before in zip(parts, kept, strict=True):
            part.copy_(before)
