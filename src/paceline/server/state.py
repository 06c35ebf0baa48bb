"""Reads and sets optimizer state, key by key, so that it fits any number of servers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.compression.base import UNSENT
from paceline.errors import ProtocolError
from paceline.server.bucket import Slot, StoredBucket
from paceline.server.own import OwnStore
from paceline.tensors import state_dtype_name, state_from_frame, to_frame
from paceline.transport.base import Frames
from paceline.updaters import Piece
from paceline.wire import messages as m


def get_state(own: OwnStore, worker: int, entries: Sequence[m.Entry]) -> tuple[m.StateIs, Frames]:
    """Return the state of ranges, each of one key, as one worker saves it."""
    items: list[m.StateItem] = []
    frames: list[object] = []
    for entry in entries:
        bucket = own.store.buckets.get(entry.block, entry.bucket)
        for slot, piece, offset in _located(own, entry):
            state = slot.updater.state(piece) | _unsent(own, worker, bucket, slice(offset, offset + piece.length))
            for name, tensor in state.items():
                shape, dtype = list(tensor.shape), state_dtype_name(tensor.dtype)
                items.append(m.StateItem(entry.block, entry.bucket, offset, piece.length, name, dtype, shape))
                frames.append(to_frame(tensor.contiguous()))
    return m.StateIs(items), frames


def _unsent(own: OwnStore, worker: int, bucket: StoredBucket, part: slice) -> dict[str, torch.Tensor]:
    """Return stored minus known values in double precision, so that known plus unsent is the value, bit for bit."""
    known = bucket.snapshots.get(bucket.slots[0].rule.unit[worker])
    if "pull" not in own.codecs or known is None:
        return {}
    return {UNSENT: bucket.values[part].double() - known[part].double()}


def set_state(own: OwnStore, worker: int, items: Sequence[m.StateItem], frames: Frames) -> None:
    """Set the state of ranges, as one worker has loaded it.

    Raises:
        ProtocolError: frames that do not fit their items.
        ValueError: state that the optimizer does not have.
    """
    if len(items) != len(frames):
        raise ProtocolError(f"{len(items)} items of state with {len(frames)} frames")
    tensors = [state_from_frame(frame, item.dtype, item.shape) for item, frame in zip(items, frames, strict=True)]
    for item, tensor in zip(items, tensors, strict=True):
        if item.name == UNSENT and (tensor.dtype != torch.float64 or tensor.shape != (item.length,)):
            raise ValueError(f"{UNSENT} values are float64 ({item.length},), not {tensor.dtype} {tuple(tensor.shape)}")
    for item, tensor in zip(items, tensors, strict=True):
        entry = m.Entry(item.block, item.bucket, item.start, item.length, 0)
        for slot, piece, offset in _located(own, entry):
            flat = tensor.dim() == 1 and tensor.numel() == item.length
            part = tensor[offset - item.start : offset - item.start + piece.length] if flat else tensor
            if item.name == UNSENT:
                _set_unsent(own, worker, own.store.buckets.get(item.block, item.bucket), offset, part)
            else:
                slot.updater.load_state(piece, {item.name: part})


def _set_unsent(own: OwnStore, worker: int, bucket: StoredBucket, start: int, unsent: torch.Tensor) -> None:
    """Set the stored values to what a worker knows, which it has loaded too, plus what was not sent to it."""
    if "pull" in own.codecs:
        bucket.keep_first_version(bucket.slots[0].rule.unit, is_coded=True)
    part = slice(start, start + unsent.numel())
    bucket.values[part].copy_(own.store.visible(bucket, worker)[part].double() + unsent)


def _located(own: OwnStore, entry: m.Entry) -> list[tuple[Slot, Piece, int]]:
    """Return (slot, piece inside the slot, start inside the bucket) of all pieces that a range covers."""
    bucket = own.store.buckets.checked(entry)
    stop = entry.start + entry.length
    found = []
    for slot in bucket.slots_over(entry.start, entry.length):
        for piece in slot.updater.pieces:
            first, last = max(entry.start, slot.start + piece.start), min(stop, slot.start + piece.start + piece.length)
            if first < last:
                whole = last - first == piece.length
                inner = Piece(piece.key, first - slot.start, last - first, piece.shape if whole else ())
                found.append((slot, inner, first))
    return found
