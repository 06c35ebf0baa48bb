"""Requests that push, and those that clip what was pushed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import msgspec
import torch

from paceline.consistency import Pushed
from paceline.errors import ProtocolError
from paceline.net.base import Frames
from paceline.server import rows
from paceline.server.bucket import StoredBucket
from paceline.server.checks import check_push, check_sum, is_absent, pushes_of
from paceline.server.clip import ClipSink, Located
from paceline.server.forward import ForwardStore
from paceline.server.hosted import HostedStore, ServerState
from paceline.server.members import Asker
from paceline.server.merge import Contribution, Encoded
from paceline.server.pulls import send_known, send_rows, send_values
from paceline.server.push_request import PushRequest
from paceline.server.store import BucketStore
from paceline.tensors import from_frame
from paceline.updaters import StepOptions, check_numbers
from paceline.wire import messages as m

Values: TypeAlias = torch.Tensor | Encoded | None
"""Of an entry: flat [length of the entry], in the memory of the frame or of the worker; some rows (sparse); encoded;
None: there is no gradient."""

_options_decoder = msgspec.msgpack.Decoder(StepOptions)


@lru_cache(maxsize=1024)
def _options(encoded: bytes) -> StepOptions | None:
    """Decode options; the same bytes give the same object, so that a change is seen by identity."""
    if not encoded:
        return None
    options = _options_decoder.decode(encoded)
    check_numbers(options.groups, options.keys)
    return options


class WorkerPush(PushRequest):
    """A worker's push.

    Args:
        asker: the worker.
        store: takes it.
        push: the message.
        knows: as in :class:`PushRequest`.
    """

    def __init__(self, asker: Asker, store: BucketStore, push: m.Push, knows: bool) -> None:
        super().__init__(asker, asker.rank, push.want, push.shared, knows)
        self._store, self._push = store, push

    def answer(self) -> None:
        """Answer with what the worker wants."""
        push, notes = self._push, self.notes or ()
        if push.want and push.rows:
            send_rows(self.asker, self._store, push.entries[0])
        elif self.known:
            send_known(self.asker, self._store, [], self.known, self.absent, notes)
        elif push.want and not push.shared:
            send_values(self.asker, self._store, self.worker, push.entries, self.absent, notes)
        else:
            self.asker.reply(m.Values([], absent=sorted(self.absent), notes=list(notes)))


class SumPush(PushRequest):
    """A sum of pushes that another server has made.

    Args:
        asker: the server.
        store: takes it.
        push: the message.
    """

    def __init__(self, asker: Asker, store: BucketStore, push: m.PushSum) -> None:
        super().__init__(asker, push.shares[0].worker)
        self._store, self._push = store, push

    def answer(self) -> None:
        """Answer with the values that the first worker behind the sum sees."""
        send_values(self.asker, self._store, self.worker, self._push.entries, self.absent, self.notes or ())


def push(host: ServerState, asker: Asker, body: m.Push, frames: Frames) -> None:
    """Take a push; it was checked as a whole before any of it counts."""
    hosted, worker = host.stores[body.store], asker.rank
    part = hosted.own if hosted.forward is None else hosted.holder(body)
    store = part.store
    buckets = check_push(part, worker, body)
    options = _options(body.options)
    values = _values_of(hosted, worker, body, buckets, frames)
    notes = ((worker, body.note),) if body.note else ()
    inputs = {worker: body.inputs} if body.samples else {}
    request = WorkerPush(asker, store, body, body.want and "pull" in hosted.own.codecs)
    for bucket, entry, value in zip(buckets, body.entries, values, strict=True):
        borrowed = body.shared and not body.coded and value is not None
        one = Contribution(value, body.samples, options, borrowed, skip=body.skip, notes=notes, inputs=inputs)
        store.push(bucket, entry, (Pushed(worker, entry.round, body.samples),), one, body.absent, request)
    request.release()
    if isinstance(part, ForwardStore):
        part.flush()
    if frames:
        store.received_bytes += asker.network_bytes(frames)


def push_sum(host: ServerState, asker: Asker, body: m.PushSum, frames: Frames) -> None:
    """Take a sum that another server has made of pushes of workers on its host."""
    hosted = host.stores[body.store]
    for share in body.shares:
        hosted.check_forwarder(asker.rank, share.worker)
    store, buckets = hosted.own.store, check_sum(hosted.own, body)
    options = _options(body.options)
    values = _values_of(hosted, asker.rank, body, buckets, frames)
    samples = sum(share.samples for share in body.shares)
    inputs = {share.worker: share.inputs for share in body.shares if share.samples}
    request = SumPush(asker, store, body)
    for index, (bucket, entry, value) in enumerate(zip(buckets, body.entries, values, strict=True)):
        pushes = pushes_of(body, index)
        others = tuple(one.worker for one in pushes[1:])
        common = samples, options, False, body.unit, others, (), body.skip, body.problem, body.notes, inputs
        store.push(bucket, entry, pushes, Contribution(value, *common), body.absent, request)
    request.release()
    store.received_bytes += asker.network_bytes(frames)


# ---- values ----------------------------------------------------------------------------------------------------------


def _values_of(
    hosted: HostedStore, sender: int, push: m.Push | m.PushSum, buckets: Sequence[StoredBucket], frames: Frames
) -> Sequence[Values]:
    """Return the values of each entry of a push, or sum, that was checked.

    Raises:
        ProtocolError: frames that do not fit the entries.
    """
    entries = push.entries
    if push.skip:
        return [None] * len(entries)
    coded, has_rows, in_arena = False, False, False
    if isinstance(push, m.Push):
        coded, has_rows, in_arena = push.coded, push.rows, push.shared and not push.coded
    if not in_arena and len(frames) != (2 * len(entries) if has_rows else len(entries)):
        raise ProtocolError(f"{len(entries)} entries with {len(frames)} frames of values")
    found: list[Values] = []
    for index, (entry, bucket) in enumerate(zip(entries, buckets, strict=True)):
        if push.absent and is_absent(push.absent, entry):
            found.append(None)
        elif in_arena:
            found.append(bucket.arenas[sender].grads[entry.start : entry.start + entry.length])
        elif has_rows:
            found.append(rows.pushed(bucket, entry, (frames[2 * index], frames[2 * index + 1])))
        elif coded:
            codec = hosted.own.codecs["push"]
            codec.check(frames[index], entry.length)
            found.append(Encoded(codec, frames[index], entry.length))
        else:
            found.append(from_frame(frames[index], bucket.values.dtype, entry.length))
    return found


# ---- clipping --------------------------------------------------------------------------------------------------------


def ask_norm(host: ServerState, asker: Asker, body: m.AskNorm, frames: Frames) -> None:
    """Answer with the norm of merged gradients, when all of them are merged."""
    clip, located = _located(host, body)
    clip.ask(asker, located)


def commit(host: ServerState, asker: Asker, body: m.Commit, frames: Frames) -> m.Reply:
    """Apply held gradients with their factor."""
    clip, located = _located(host, body)
    clip.commit(asker.rank, located, body.factor, body.skip)
    return m.Done()


def _located(host: ServerState, body: m.AskNorm | m.Commit) -> tuple[ClipSink, Sequence[Located]]:
    """Return the sink that holds cohorts, and the ranges that a request is about, with their buckets.

    Raises:
        ProtocolError: the store does not clip, or an entry lies outside of its bucket.
    """
    own = host.stores[body.store].own
    if own.clip is None:
        raise ProtocolError(f"store {body.store!r} does not clip; open it with a largest norm")
    return own.clip, [(own.store.buckets.checked(entry), entry) for entry in body.entries]
