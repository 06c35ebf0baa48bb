"""The sink of buckets that another server owns: sends sums to the owner, and answers workers when it has answered.

| state of a cohort | event | next |
|---|---|---|
| open | the last push of its workers here arrives | complete: put with the sums that leave next |
| complete | `flush`: all entries of the push are taken | sent: one message per owner and kind |
| sent | the rule releases its workers | sent: nobody is answered before the owner has answered |
| sent | a push behind it comes again | sent: the later request is answered instead of the first |
| sent | the owner answers with values | written once to the known values; its workers are answered |
| sent | the owner refuses, or its update fails | its workers get the owner's error, the values stay |
| sent | a worker behind it leaves | sent: the others are answered; the owner hears of the leave after the sum |

Order: what a worker says to the owner through this server (a barrier, that it leaves) is sent after its sums, on the
same connection. A message has no timeout here: workers have theirs and ask the owner, through this server, who is
missing; the death of an owner is in the scheduler's news.

What breaks the guarantees: two connections to one owner (a notice could overtake a sum), memory of a sum that changes
before the owner has answered (the transport may send it again), and an answer that is used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch

from paceline.consistency import Apply, Release
from paceline.errors import ProtocolError
from paceline.net.base import Frames
from paceline.net.call import rebuild
from paceline.ranges import within
from paceline.server.admission import absent_in
from paceline.server.bucket import Slot, StoredBucket
from paceline.server.forward.outgoing import Sum, batches, message
from paceline.server.merge import Accumulator
from paceline.server.presence import Presence
from paceline.server.push_request import PushRequest
from paceline.server.release import release_slot
from paceline.tensors import from_frame
from paceline.wire import messages as m

OnAnswer: TypeAlias = Callable[[m.Body, Frames], None]
#: ``ask(owner, body, frames, on_answer)``; what one server is asked arrives there in order.
AskFn: TypeAlias = Callable[[int, m.Request, Frames, OnAnswer], None]


class ForwardSink:
    """Sends the sums of complete cohorts to the owners of their buckets.

    Args:
        store: name.
        presence: the workers, and which of them are at a barrier.
        units: by worker that pushes here, its unit.
        ask: sends a request to another server.

    Attributes:
        described: by (block, index), the buckets as workers have described them, with their owners.
    """

    def __init__(self, store: str, presence: Presence, units: Mapping[int, int], ask: AskFn) -> None:
        self.described: dict[tuple[int, int], m.ForwardedBucket] = {}
        self._store, self._presence, self._unit_of, self._ask = store, presence, units, ask
        self._outgoing: list[Sum] = []

    def complete(self, bucket: StoredBucket, slot: Slot, accumulator: Accumulator, action: Apply) -> None:
        """Put the sum of a complete cohort with those that leave next."""
        dtype, at_barrier = slot.updater.value.dtype, self._presence.at_barrier
        values, unit = accumulator.sum() or (torch.zeros_like(slot.updater.value), 1.0)
        shares = tuple((one, accumulator.shares[one], one in at_barrier) for one in action.workers)
        rounds = tuple(slot.rule.pushed[one] for one in action.workers)
        owner, start, length = self.described[bucket.place].owner, slot.start, slot.length
        self._outgoing.append(Sum(owner, bucket, start, length, accumulator, values.to(dtype), unit, shares, rounds))

    def release(self, bucket: StoredBucket, slot: Slot, action: Release) -> None:
        """Answer nobody before the owner has answered."""

    def flush(self) -> None:
        """Send the sums that have become complete, those that go together in one message."""
        outgoing, self._outgoing = self._outgoing, []
        for sums in batches(outgoing):
            body, frames = message(self._store, sums)
            self._ask(sums[0].owner, body, frames, partial(self._take_answer, sums))

    def forget(self, bucket: StoredBucket, slot: Slot, worker: int) -> None:
        """Wait for nothing: the owner answers for the others."""

    def before_read(self, bucket: StoredBucket, worker: int, start: int, length: int) -> None:
        """Show the owner's last answer."""

    # ---- answers of owners -----------------------------------------------------------------------------------------

    def _take_answer(self, sums: Sequence[Sum], body: m.Body, frames: Frames) -> None:
        """Answer the workers behind sums."""
        for one in sums:
            one.accumulator.close()
        try:
            answer, values = _checked(sums, body, frames)
        except Exception as error:  # noqa: BLE001 - process border: all who wait get whatever is wrong
            for request in [request for one in sums for _, request in _take_waiting(one)]:
                request.fail(error)
            return
        for one, new in zip(sums, values, strict=True):
            self._known_values(one)[one.start : one.start + one.length].copy_(new)
            absent = absent_in(answer.absent, one.entry) if answer.absent else ()
            for slot, request in _take_waiting(one):
                slot.notes = answer.notes
                if absent or slot.absent:
                    slot.absent[request.worker] = within(absent, slot.start, slot.stop)
                release_slot(one.bucket, slot, request)

    def _known_values(self, one: Sum) -> torch.Tensor:
        """Return the values of the bucket as the workers behind a sum know them; units know different versions."""
        units = sorted(set(self._unit_of.values()))
        if len(units) > 1:
            one.bucket.keep_first_version(units)
        return one.bucket.visible(self._unit_of[one.shares[0][0]])


def _checked(sums: Sequence[Sum], body: m.Body, frames: Frames) -> tuple[m.Values, list[torch.Tensor]]:
    """Return the owner's answer to sums, and the new values, each flat [length of the sum].

    Raises:
        Exception: that the owner answered with.
        ProtocolError: the answer does not fit the sums.
    """
    owner = sums[0].owner
    if isinstance(body, m.Failed):
        raise rebuild(body, f"server {owner}")
    if not isinstance(body, m.Values):
        raise ProtocolError(f"server {owner} answered a sum with {type(body).__name__}")
    if len(frames) != len(sums):
        raise ProtocolError(f"server {owner} answered {len(sums)} sums with {len(frames)} frames of values")
    pairs = zip(sums, frames, strict=True)
    return body, [from_frame(frame, one.bucket.values.dtype, one.length) for one, frame in pairs]


def _take_waiting(one: Sum) -> list[tuple[Slot, PushRequest]]:
    """Take out the requests that wait for a sum; its slot may have been cut since."""
    slots = one.bucket.slots_over(one.start, one.length)
    found = [(slot, slot.pending.pop(worker, None)) for slot in slots for worker, _, _ in one.shares]
    return [(slot, request) for slot, request in found if request is not None]
