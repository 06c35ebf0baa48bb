"""Optimizer state between server and wire, key by key, so that it fits any number of servers."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import ProtocolError
from paceline.roles.bucket import Slot
from paceline.roles.stored import ServerStore
from paceline.tensors import state_dtype_name, state_from_frame, to_frame
from paceline.transport.base import Frames
from paceline.updaters import Piece
from paceline.wire import messages as m


def get_state(store: ServerStore, entries: Sequence[m.Entry]) -> tuple[m.StateIs, Frames]:
    """Return the state of stretches that are (parts of) one key each."""
    items: list[m.StateItem] = []
    frames: list[object] = []
    for entry in entries:
        for slot, piece, offset in _located(store, entry):
            for name, tensor in slot.updater.state(piece).items():
                shape, dtype = list(tensor.shape), state_dtype_name(tensor.dtype)
                items.append(m.StateItem(entry.block, entry.bucket, offset, piece.length, name, dtype, shape))
                frames.append(to_frame(tensor.contiguous()))
    return m.StateIs(items), frames


def set_state(store: ServerStore, items: Sequence[m.StateItem], frames: Frames) -> None:
    """Set the state of stretches.

    Raises:
        ProtocolError: frames that do not fit their items.
        ValueError: state that the optimizer does not have.
    """
    if len(items) != len(frames):
        raise ProtocolError(f"{len(items)} items of state with {len(frames)} frames")
    tensors = [state_from_frame(frame, item.dtype, item.shape) for item, frame in zip(items, frames, strict=True)]
    for item, tensor in zip(items, tensors, strict=True):
        entry = m.Entry(item.block, item.bucket, item.start, item.length, 0)
        for slot, piece, offset in _located(store, entry):
            flat = tensor.dim() == 1 and tensor.numel() == item.length
            part = tensor[offset - item.start : offset - item.start + piece.length] if flat else tensor
            slot.updater.load_state(piece, {item.name: part})


def _located(store: ServerStore, entry: m.Entry) -> list[tuple[Slot, Piece, int]]:
    """Return (slot, piece inside the slot, start inside the bucket) of all that a stretch covers."""
    bucket = store.bucket(entry.block, entry.bucket)
    store.check_entry(bucket, entry)
    stop = entry.start + entry.length
    found = []
    for slot in bucket.slots:
        for piece in slot.updater.pieces:
            first, last = max(entry.start, slot.start + piece.start), min(stop, slot.start + piece.start + piece.length)
            if first < last:
                whole = last - first == piece.length
                inner = Piece(piece.key, first - slot.start, last - first, piece.shape if whole else ())
                found.append((slot, inner, first))
    return found
