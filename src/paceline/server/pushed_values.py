"""The values of a push, as its frames or the worker's memory hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.compression import Codec
from paceline.errors import ProtocolError
from paceline.net.base import Frames
from paceline.server import rows
from paceline.server.admission import is_absent
from paceline.server.bucket import StoredBucket
from paceline.server.merge import Encoded
from paceline.tensors import from_frame
from paceline.wire import messages as m


def values_of(
    push: m.Push, worker: int, buckets: Sequence[StoredBucket], frames: Frames, codec: Codec | None
) -> list[torch.Tensor | Encoded | None]:
    """Return the values of each entry of a push.

    Args:
        push: was checked.
        worker: that pushes.
        buckets: of the entries.
        frames: of the push.
        codec: of the push leg.

    Returns:
        Per entry: flat values [length of the entry], in the memory of the frame or of the worker; some rows (sparse);
        encoded values; or None where there is no gradient.

    Raises:
        ProtocolError: frames that do not fit the entries.
    """
    if push.skip:
        return [None] * len(push.entries)
    triples = zip(push.entries, buckets, _frames_of(push, frames), strict=True)
    return [_values(push, worker, entry, bucket, frame, codec) for entry, bucket, frame in triples]


def _frames_of(push: m.Push, frames: Frames) -> Sequence[Any]:
    """Return the frames of each entry; None where the values are in shared memory."""
    entries = len(push.entries)
    if push.shared and not push.coded:
        return [None] * entries
    if len(frames) != (2 * entries if push.rows else entries):
        raise ProtocolError(f"{entries} entries with {len(frames)} frames of values")
    return list(zip(frames[::2], frames[1::2], strict=True)) if push.rows else frames


def _values(
    push: m.Push, worker: int, entry: m.Entry, bucket: StoredBucket, frame: Any, codec: Codec | None
) -> torch.Tensor | Encoded | None:
    if push.absent and is_absent(push.absent, entry):
        return None
    if push.rows:
        return rows.pushed(bucket, entry, frame)
    if frame is None:
        return bucket.arenas[worker].grads[entry.start : entry.start + entry.length]
    if push.coded:
        assert codec is not None
        codec.check(frame, entry.length)
        return Encoded(codec, frame, entry.length)
    return from_frame(frame, bucket.values.dtype, entry.length)


def values_of_sum(push: m.PushSum, buckets: Sequence[StoredBucket], frames: Frames) -> list[torch.Tensor | None]:
    """Return the values of each entry of a sum, flat [length of the entry]; None where there is no gradient.

    Raises:
        ProtocolError: frames that do not fit the entries.
    """
    if push.skip:
        return [None] * len(push.entries)
    if len(frames) != len(push.entries):
        raise ProtocolError(f"{len(push.entries)} entries with {len(frames)} frames of values")
    return [
        None if is_absent(push.absent, entry) else from_frame(frame, bucket.values.dtype, entry.length)
        for frame, entry, bucket in zip(frames, push.entries, buckets, strict=True)
    ]
