"""State between server and wire, key by key, so that it fits any number of servers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import ProtocolError
from paceline.server.bucket import Slot, StoredBucket
from paceline.server.store import ServerStore
from paceline.tensors import state_dtype_name, state_from_frame, to_frame
from paceline.transport.base import Frames
from paceline.updaters import Piece
from paceline.wire import messages as m

#: The values minus what a worker knows of them, where pulls are compressed: a part of the state like any other.
UNSENT = "unsent"


def get_state(store: ServerStore, worker: int, entries: Sequence[m.Entry]) -> tuple[m.StateIs, Frames]:
    """Return the state of stretches that are (parts of) one key each, as one worker is to save it."""
    items: list[m.StateItem] = []
    frames: list[object] = []
    for entry in entries:
        bucket = store.bucket(entry.block, entry.bucket)
        for slot, piece, offset in _located(store, entry):
            state = slot.updater.state(piece) | _unsent(store, worker, bucket, slice(offset, offset + piece.length))
            for name, tensor in state.items():
                shape, dtype = list(tensor.shape), state_dtype_name(tensor.dtype)
                items.append(m.StateItem(entry.block, entry.bucket, offset, piece.length, name, dtype, shape))
                frames.append(to_frame(tensor.contiguous()))
    return m.StateIs(items), frames


def _unsent(store: ServerStore, worker: int, bucket: StoredBucket, part: slice) -> dict[str, torch.Tensor]:
    """Return what a worker was not told yet, in double precision: so known plus unsent is the value, bit for bit."""
    known = bucket.snapshots.get(bucket.slots[0].rule.unit[worker])
    if "pull" not in store.codecs or known is None:
        return {}
    return {UNSENT: bucket.values[part].double() - known[part].double()}


def set_state(store: ServerStore, worker: int, items: Sequence[m.StateItem], frames: Frames) -> None:
    """Set the state of stretches, as one worker has loaded it.

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
        for slot, piece, offset in _located(store, entry):
            flat = tensor.dim() == 1 and tensor.numel() == item.length
            part = tensor[offset - item.start : offset - item.start + piece.length] if flat else tensor
            if item.name == UNSENT:
                _set_unsent(store, worker, store.bucket(item.block, item.bucket), offset, part)
            else:
                slot.updater.load_state(piece, {item.name: part})


def _set_unsent(store: ServerStore, worker: int, bucket: StoredBucket, start: int, unsent: torch.Tensor) -> None:
    """Set the values to what a worker knows, which is what it started from, plus what it was not told."""
    if "pull" in store.codecs:
        bucket.keep_first_version(bucket.slots[0].rule.unit)
    part = slice(start, start + unsent.numel())
    bucket.values[part].copy_(store.visible(bucket, worker)[part].double() + unsent)


def _located(store: ServerStore, entry: m.Entry) -> list[tuple[Slot, Piece, int]]:
    """Return (slot, piece inside the slot, start inside the bucket) of all that a stretch covers."""
    bucket = store.bucket(entry.block, entry.bucket)
    store.check_entry(bucket, entry)
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
