"""How a slot releases the pushes that wait for it."""

from __future__ import annotations

from paceline.compression.buffers import Bytes
from paceline.server.bucket import Slot, StoredBucket
from paceline.server.push_request import PushRequest


def release_slot(bucket: StoredBucket, slot: Slot, request: PushRequest, payload: Bytes | None = None) -> None:
    """Add what a slot has for the answer to a push, and release the push.

    Args:
        bucket: of the slot.
        slot: has done its part of the push.
        request: the push.
        payload: the last difference of the known values, encoded, in a store that compresses pulls.
    """
    worker = request.worker
    if request.want and request.shared:
        show(bucket, worker, slot.rule.unit[worker], slot.start, slot.length)
    if request.known is not None and bucket.answers is None:
        request.known.append(bucket.tell(slot, worker, request.shared, payload))
    if slot.absent:
        absent = slot.absent.get(worker, ())
        request.absent |= {(*bucket.place, slot.start + start, stop - start) for start, stop in absent}
    request.hear(slot.notes)
    request.release()


def show(bucket: StoredBucket, worker: int, unit: int, start: int, length: int) -> None:
    """Write values, as a worker's unit sees them, into the worker's arena, unless the worker maps ours."""
    arena, part = bucket.arenas[worker], slice(start, start + length)
    if arena.values is not None:
        arena.values[part].copy_(bucket.visible(unit)[part])
