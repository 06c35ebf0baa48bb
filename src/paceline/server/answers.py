"""What answers to pushes and pulls bring.

| request | the answer brings |
|---|---|
| a push that wants nothing, or whose values were written to shared memory | no frames |
| a push or pull in a store that compresses pulls | what its worker knows now: differences, or values |
| any other push that wants values, a sum, a pull | values |
| a push of rows that wants rows | rows |

An answer may be given again when it got lost. Values are then read anew: they may be newer, and the worker takes them
as they come. Differences and rows are the same bytes, because what the worker knows was counted when they were made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from paceline.server import rows
from paceline.server.asker import Asker
from paceline.server.merge import Notes
from paceline.server.push_request import Known, Place, PushRequest
from paceline.server.store import BucketStore
from paceline.tensors import to_frame
from paceline.wire import messages as m


def answer_push(asker: Asker, store: BucketStore, push: m.Push, request: PushRequest) -> None:
    """Answer a push that all slots have released."""
    if push.want and push.rows:
        send_rows(asker, store, push.entries[0])
    elif request.known:
        send_known(asker, store, [], request.known, request.absent, request.notes or ())
    elif push.want and not push.shared:
        send_values(asker, store, request.worker, push.entries, request.absent, request.notes or ())
    else:
        asker.reply(m.Values([], absent=_ranges(request.absent), notes=list(request.notes or ())))


def answer_sum(asker: Asker, store: BucketStore, push: m.PushSum, request: PushRequest) -> None:
    """Answer a sum of pushes that all slots have released."""
    send_values(asker, store, request.worker, push.entries, request.absent, request.notes or ())


def send_values(
    asker: Asker,
    store: BucketStore,
    worker: int,
    entries: Sequence[m.Entry],
    absent: Collection[Place] = (),
    notes: Notes = (),
) -> None:
    """Answer with values, as they are at the moment of sending, also when the answer is given again."""

    def read() -> tuple[list[int], list[Any]]:
        found = [store.read(worker, entry) for entry in entries]
        still = [store.stands_still(worker, entry) for entry in entries]
        copied = [values if is_still else values.clone() for (_, values), is_still in zip(found, still, strict=True)]
        return [version for version, _ in found], [to_frame(values) for values in copied]

    versions, frames = read()
    store.sent_bytes += asker.network_bytes(frames)
    first = [frames]
    # The next forward pass needs the first layers first.
    urgency = entries[0].bucket if entries else None
    body = m.Values(versions, absent=_ranges(absent), notes=list(notes))
    asker.answer(body, lambda: first.pop() if first else read()[1], urgency)


def send_known(
    asker: Asker,
    store: BucketStore,
    versions: list[int],
    known: Sequence[Known],
    absent: Collection[Place] = (),
    notes: Notes = (),
) -> None:
    """Answer with what a worker knows now; given again, the answer is the same bytes."""
    frames = [frame for _, frame in known if frame is not None]
    store.sent_bytes += asker.network_bytes(frames)
    urgency = known[0][0].bucket if frames else None
    body = m.Values(versions, [one for one, _ in known], _ranges(absent), list(notes))
    asker.answer(body, lambda: frames, urgency)


def send_rows(asker: Asker, store: BucketStore, entry: m.Entry) -> None:
    """Answer a push of rows with rows; given again, the answer is the same bytes."""
    version, values = store.read(asker.rank, entry)
    frames = rows.taken(store.buckets.get(entry.block, entry.bucket), asker.rank, version, values)
    store.sent_bytes += asker.network_bytes(frames)
    asker.answer(m.Values([version]), lambda: frames, entry.bucket)


def _ranges(absent: Collection[Place]) -> list[m.AbsentRange]:
    return [m.AbsentRange(*one) for one in sorted(absent)] if absent else []
