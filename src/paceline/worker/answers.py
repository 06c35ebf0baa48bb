"""What answers bring into the arenas of a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.compression import Codec
from paceline.errors import ConfigError, ProtocolError
from paceline.tensors import from_frame
from paceline.transport.base import Frames
from paceline.wire import messages as m
from paceline.worker.block import WorkerBlock

Blocks = Mapping[int, WorkerBlock]


def store_values(blocks: Blocks, entries: Sequence[m.Entry], frames: Frames) -> None:
    """Store one frame of values per entry that was asked for.

    Raises:
        ProtocolError: a frame has another size.
    """
    for entry, frame in zip(entries, frames, strict=True):
        block = blocks[entry.block]
        part = block.arena_slice(entry.bucket, entry.start, entry.length)
        block.values[part].copy_(from_frame(frame, block.dtype, entry.length))


def store_told(
    blocks: Blocks,
    entries: Sequence[m.Entry],
    shared: bool,
    codec: Codec | None,
    told: Sequence[m.KnownRange],
    frames: Frames,
) -> None:
    """Store what a server that compresses pulls tells. What the worker knows already is left as it is.

    Args:
        blocks: by number.
        entries: what was asked for.
        shared: the server has written the values in place, and there are no frames.
        codec: of the pull leg.
        told: the ranges that the answer is about.
        frames: one for each of them, unless ``shared``.

    Raises:
        ConfigError: a difference came, but this worker has no codec for it.
        ProtocolError: the answer is not about what was asked for, a frame has another size or impossible content, or an
            earlier difference is missing; a plain pull brings the values then.
    """
    _check_asked(entries, told)
    if not shared and len(frames) != len(told):
        raise ProtocolError(f"an answer about {len(told)} ranges has {len(frames)} frames")
    for one, frame in zip(told, [None] * len(told) if shared else frames, strict=True):
        block = blocks[one.block]
        versions = block.buckets[one.bucket].versions
        if shared or _is_news(one, versions.of(one.start, one.length)):
            if not shared:
                _store(block, one, codec, frame)
            versions.set(one.start, one.length, one.version)


def _check_asked(entries: Sequence[m.Entry], told: Sequence[m.KnownRange]) -> None:
    asked: dict[tuple[int, int], list[m.Entry]] = {}
    for entry in entries:
        asked.setdefault((entry.block, entry.bucket), []).append(entry)
    for one in told:
        stop = one.start + one.length
        if not any(e.start <= one.start and stop <= e.start + e.length for e in asked.get((one.block, one.bucket), ())):
            raise ProtocolError(
                f"an answer is about elements {one.start} to {stop} of bucket {one.bucket} of block {one.block}, "
                "which were not asked for"
            )


def _is_news(one: m.KnownRange, held: set[int]) -> bool:
    """Tell whether a worker lacks what it is told: an answer may be overtaken by a later one."""
    newest = max(held, default=0)
    if one.coded and one.version > newest and held and held != {one.version - 1}:
        raise ProtocolError(
            f"elements {one.start} to {one.start + one.length} of bucket {one.bucket} of block {one.block} were to "
            f"move to version {one.version}, but this worker holds {sorted(held)}; pull their keys to get the values"
        )
    return one.version > newest or (one.version == newest and not one.coded)


def _store(block: WorkerBlock, one: m.KnownRange, codec: Codec | None, frame: Any) -> None:
    values = block.values[block.arena_slice(one.bucket, one.start, one.length)]
    if not one.coded:
        values.copy_(from_frame(frame, block.dtype, one.length))
    elif codec is None:
        raise ConfigError(
            "the servers compress pulls, but this worker does not: every worker calls set_gradient_compression with "
            "the same settings before its first push"
        )
    else:
        codec.decode_add(frame, values)
