"""Requests that read values or set them outside of any round, and the answers to pushes and pulls.

| request | the answer brings |
|---|---|
| a push that wants nothing, or whose values were written to shared memory | no frames |
| a push or pull in a store that compresses pulls | the worker's known values now: differences, or values |
| any other push that wants values, a sum, a pull | values |
| a push of rows that wants rows | rows |

An answer may be given again when it got lost. Values are then read anew: they may be newer, and the worker takes them
as they come. Differences and rows are the same bytes, because they were counted as known when they were made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from paceline.errors import ProtocolError
from paceline.layout.tensors import from_frame, to_frame
from paceline.net.base import Frames
from paceline.server import rows
from paceline.server.bucket import Known
from paceline.server.bucket_store import BucketStore, check_once
from paceline.server.hosted import Result, ServerState
from paceline.server.members import Asker
from paceline.server.merge import Notes
from paceline.wire import messages as m


def pull(host: ServerState, asker: Asker, body: m.Pull, frames: Frames) -> None:
    """Answer with the values of ranges."""
    store, worker = host.stores[body.store].own, asker.rank
    check_once(body.entries, "pulled")
    buckets = [store.checked(entry) for entry in body.entries]
    for entry, bucket in zip(body.entries, buckets, strict=True):
        if body.shared and worker not in bucket.arenas:
            raise ProtocolError(f"worker {worker} has not offered shared memory for block {entry.block}")
    if not body.shared and "pull" not in store.codecs:
        send_values(asker, store, worker, body.entries)
        return
    known = list[Known]()
    for entry, bucket in zip(body.entries, buckets, strict=True):
        store.read(worker, entry)
        if body.shared:
            bucket.show(worker, store.units[worker], entry)
        if "pull" in store.codecs:
            known += bucket.tell_range(worker, entry, body.shared)
    send_known(asker, store, known)


def pull_rows(host: ServerState, asker: Asker, body: m.PullRows, frames: Frames) -> Result:
    """Answer with the rows that the frame names or, without a frame, with those that the worker lacks."""
    store, worker, entry = host.stores[body.store].own, asker.rank, body.entry
    bucket = store.get(entry.block, entry.bucket)
    if not frames and bucket.answers is not None and bucket.answers.stores_value:
        store.checked(entry)
        return m.Values(), _new_rows(store, worker, entry)
    if len(frames) != 1 or (bucket.answers is not None and not bucket.answers.stores_value):
        raise ProtocolError(f"a pull of rows with {len(frames)} frames of row numbers makes no sense here")
    chosen = rows.numbers(bucket, entry, frames[0])
    values = store.read(worker, entry)
    return m.Values(), [to_frame(values.view(rows.shape_of(bucket, entry))[chosen])]


def set_values(host: ServerState, asker: Asker, body: m.SetValues, frames: Frames) -> m.Reply:
    """Set the values of ranges for all workers."""
    store = host.stores[body.store].own
    if len(frames) != len(body.entries):
        raise ProtocolError(f"{len(body.entries)} entries with {len(frames)} frames of values")
    buckets = [store.checked(entry) for entry in body.entries]
    triples = zip(buckets, body.entries, frames, strict=True)
    values = [from_frame(frame, bucket.values.dtype, entry.length) for bucket, entry, frame in triples]
    for bucket, entry, new in zip(buckets, body.entries, values, strict=True):
        bucket.overwrite(entry, new)
    return m.Done()


# ---- answers ---------------------------------------------------------------------------------------------------------


def send_values(
    asker: Asker,
    store: BucketStore,
    worker: int,
    entries: Sequence[m.Entry],
    absent: Collection[m.Span] = (),
    notes: Notes = (),
) -> None:
    """Answer with values, as they are at the moment of sending, also when the answer is given again."""

    def read() -> Frames:
        frames = []
        for entry in entries:
            values = store.read(worker, entry)
            frames.append(to_frame(values if store.stands_still(worker, entry) else values.clone()))
        store.sent_bytes += asker.network_bytes(frames)
        return frames

    # The next forward pass needs the first layers first.
    urgency = entries[0].bucket if entries else None
    asker.answer(m.Values(absent=sorted(absent), notes=list(notes)), read, urgency)


def send_known(
    asker: Asker,
    store: BucketStore,
    known: Sequence[Known],
    absent: Collection[m.Span] = (),
    notes: Notes = (),
) -> None:
    """Answer with the ranges that a worker knows now; given again, the answer is the same bytes."""
    frames = [frame for _, frame in known if frame is not None]
    store.sent_bytes += asker.network_bytes(frames)
    urgency = known[0][0].bucket if frames else None
    body = m.Values([one for one, _ in known], sorted(absent), list(notes))
    asker.answer(body, lambda: frames, urgency)


def send_rows(asker: Asker, store: BucketStore, entry: m.Entry) -> None:
    """Answer a push of rows with rows; given again, the answer is the same bytes."""
    frames = _new_rows(store, asker.rank, entry)
    store.sent_bytes += asker.network_bytes(frames)
    asker.answer(m.Values(), lambda: frames, entry.bucket)


def _new_rows(store: BucketStore, worker: int, entry: m.Entry) -> list[Any]:
    """Return the frames of the rows that are new to a worker, which reads now."""
    bucket, values = store.get(entry.block, entry.bucket), store.read(worker, entry)
    return rows.taken(bucket, worker, bucket.slots[0].rule.read[worker], values)
