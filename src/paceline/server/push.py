"""Requests that push: checked as a whole before any part takes effect. And those that clip pushes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TypeAlias

import msgspec
import torch

from paceline.consistency import Pushed
from paceline.consistency.objections import objection
from paceline.errors import ProtocolError
from paceline.layout.ranges import is_all, within
from paceline.layout.tensors import from_frame
from paceline.net.base import Frames
from paceline.server import rows
from paceline.server.bucket import PushRequest, StoredBucket
from paceline.server.bucket_store import BucketStore, absent_in, check_once
from paceline.server.clip_sink import ClipSink, Located
from paceline.server.forward import ForwardStore
from paceline.server.hosted import HostedStore, ServerState
from paceline.server.members import Asker
from paceline.server.merge import Contribution, Encoded
from paceline.server.own import OwnStore
from paceline.server.pulls import send_known, send_rows, send_values
from paceline.updaters import StepOptions, check_numbers
from paceline.wire import messages as m

Values: TypeAlias = torch.Tensor | Encoded | None
"""Values of an entry: flat [length of the entry], in the memory of the frame or of the worker; some rows (sparse);
encoded; None: there is no gradient."""

#: Parts of a bucket with a state of their own, beside those of its keys.
MAX_PARTS = 2**14

_options_decoder = msgspec.msgpack.Decoder(StepOptions)


@lru_cache(maxsize=1024)
def _options(encoded: bytes) -> StepOptions | None:
    """Decode options; the same bytes give the same object, so that a change is seen by identity."""
    if not encoded:
        return None
    options = _options_decoder.decode(encoded)
    check_numbers(options.groups, options.keys)
    return options


def _reply(store: BucketStore, push: m.Push | m.PushSum, request: PushRequest) -> None:
    """Answer a push as its worker wants; a sum with the values that the first worker behind it sees."""
    asker, notes = request.asker, request.notes or ()
    if request.want and isinstance(push, m.Push) and push.rows:
        send_rows(asker, store, push.entries[0])
    elif request.known:
        send_known(asker, store, request.known, request.absent, notes)
    elif request.want and not request.shared:
        send_values(asker, store, request.worker, push.entries, request.absent, notes)
    else:
        asker.answer(m.Values(absent=sorted(request.absent), notes=list(notes)))


def push(host: ServerState, asker: Asker, body: m.Push, frames: Frames) -> None:
    """Take a push; it was checked as a whole before any of it counts."""
    hosted, worker = host.stores[body.store], asker.rank
    part = hosted.own if hosted.forward is None else hosted.holder(body)
    part.check_kind(body)
    pushes = [(Pushed(worker, entry.round, body.samples),) for entry in body.entries]
    buckets, options = _check(part, worker, body, pushes), _options(body.options)
    values = _values_of(hosted, worker, body, buckets, frames)
    notes = ((worker, body.note),) if body.note else ()
    request = PushRequest(
        asker=asker,
        worker=worker,
        unreleased=len(body.entries),
        reply=partial(_reply, part, body),
        want=body.want,
        shared=body.shared,
        known=[] if body.want and "pull" in hosted.own.codecs else None,
    )
    for bucket, entry, pushed, value in zip(buckets, body.entries, pushes, values, strict=True):
        borrowed = body.shared and not body.coded and value is not None
        one = Contribution(value, body.samples, options, borrowed, skip=body.skip, notes=notes)
        if part is hosted.own:
            hosted.own.note_options(entry, pushed, options)
        part.push(bucket, entry, pushed, one, body.absent, request)
    if hosted.forward is not None:
        hosted.forward.flush()
    if frames:
        part.received_bytes += asker.network_bytes(frames)


def push_sum(host: ServerState, asker: Asker, body: m.PushSum, frames: Frames) -> None:
    """Take a sum that another server has made of pushes of workers on its host."""
    hosted = host.stores[body.store]
    for share in body.shares:
        hosted.check_forwarder(asker.rank, share.worker)
    own = hosted.own
    _check_sum(own, body)
    shares = sorted(body.shares, key=lambda share: share.worker)
    pushes = [
        [Pushed(one.worker, round, one.samples) for one, round in zip(shares, rounds, strict=True)]
        for rounds in zip(*[one.rounds for one in shares], strict=True)
    ]
    buckets, options = _check(own, asker.rank, body, pushes), _options(body.options)
    values = _values_of(hosted, asker.rank, body, buckets, frames)
    samples, others = sum(share.samples for share in shares), tuple(share.worker for share in shares[1:])
    worker, unreleased = body.shares[0].worker, len(body.entries)
    request = PushRequest(asker=asker, worker=worker, unreleased=unreleased, reply=partial(_reply, own, body))
    common = samples, options, False, body.unit, others, (), body.skip, body.problem, body.notes
    for bucket, entry, pushed, value in zip(buckets, body.entries, pushes, values, strict=True):
        own.note_options(entry, pushed, options)
        own.push(bucket, entry, pushed, Contribution(value, *common), body.absent, request)
    own.received_bytes += asker.network_bytes(frames)


# ---- checks: a push that is refused has changed nothing --------------------------------------------------------------

StorePart: TypeAlias = OwnStore | ForwardStore


def _check(
    part: StorePart, sender: int, push: m.Push | m.PushSum, pushes: Sequence[Sequence[Pushed]]
) -> list[StoredBucket]:
    """Refuse a push or sum that cannot be carried out as a whole; returns the buckets of its entries.

    Raises:
        KeyMismatchError: a bucket is not here.
        ProtocolError: values of a kind that is not taken here, entries that do not exist, rounds that make no sense, or
            memory that is not mapped.
        RemoteError: an earlier update failed.
    """
    if len(push.entries) != 1 or push.absent:
        _check_ranges(part, push)
    has_rows, is_shared = (push.rows, push.shared) if isinstance(push, m.Push) else (False, False)
    buckets, has_parts = [], False
    for entry, pushed in zip(push.entries, pushes, strict=True):
        bucket = part.checked(entry)
        buckets.append(bucket)
        has_parts |= entry.length < bucket.values.numel()
        if has_rows or bucket.answers is not None:
            _check_rows(bucket, entry, has_rows, isinstance(push, m.Push) and push.want)
        if is_shared and sender not in bucket.arenas:
            raise ProtocolError(f"worker {sender} has not offered shared memory for block {entry.block}")
        for slot in bucket.slots_over(entry):
            reason = objection(slot.rule, pushed)
            for one in pushed:
                slot.check_round(one.worker, one.round, reason)
    if has_parts:
        _check_parts(Counter(buckets))
    return buckets


def _check_parts(counts: Mapping[StoredBucket, int]) -> None:
    """Refuse a push that leaves a bucket in too many parts: each has a state of its own. Workers push whole keys."""
    for bucket, count in counts.items():
        held, most = len(bucket.slots), MAX_PARTS + 2 * len(bucket.pieces)
        if held + 2 * count > most:
            raise ProtocolError(
                f"{count} parts of bucket {bucket.place[1]} of block {bucket.place[0]}, which is in {held} already; at "
                f"most {most} are kept"
            )


def _check_rows(bucket: StoredBucket, entry: m.Entry, has_rows: bool, wants: bool) -> None:
    """Refuse rows of a bucket that does not take them, and anything else for one that takes rows only."""
    if has_rows:
        rows.shape_of(bucket, entry)
    if bucket.answers is not None and not (has_rows or bucket.answers.stores_value):
        raise ProtocolError(f"bucket {entry.bucket} of block {entry.block} takes rows only: it has no values")
    if has_rows and wants and bucket.answers is None:
        raise ProtocolError(f"bucket {entry.bucket} of block {entry.block} was not made to answer with rows")


def _check_sum(own: OwnStore, push: m.PushSum) -> None:
    """Refuse a sum that the store does not take.

    Raises:
        ConfigError: the store needs an optimizer.
        ProtocolError: numbers that make no sense, or a store that answers every worker by itself.
    """
    if not own.has_updater:
        raise own.no_updater()
    if not push.shares or any(len(share.rounds) != len(push.entries) for share in push.shares):
        raise ProtocolError(f"a sum of {len(push.entries)} entries without one round per entry and worker")
    if not 0 < push.unit < float("inf"):
        raise ProtocolError(f"a sum whose unit is {push.unit} samples")
    if "pull" in own.codecs:
        raise ProtocolError(f"a sum for store {own.name!r}, which compresses what it answers every worker")


def _check_ranges(part: StorePart, push: m.Push | m.PushSum) -> None:
    """Refuse a push without entries, with an element twice, or with absent ranges other than whole keys of its own."""
    if not push.entries:
        raise ProtocolError(f"a {type(push).__name__} without entries")
    check_once(push.entries, "pushed")
    for gap in push.absent:
        pushed = any(e.place == gap.place and e.start <= gap.start and gap.stop <= e.stop for e in push.entries)
        bucket = part.get(gap.block, gap.bucket)
        # A server that forwards does not know which keys lie where.
        is_key = isinstance(part, ForwardStore) or (bucket.is_edge(gap.start) and bucket.is_edge(gap.stop))
        if not pushed or not is_key:
            raise ProtocolError(
                f"elements {gap.start} to {gap.stop} of bucket {gap.bucket} are absent, but not a key's in the push"
            )


def _is_absent(absent: Sequence[m.Span], entry: m.Entry) -> bool:
    """Tell whether an entry is absent as a whole."""
    return is_all(within(absent_in(absent, entry), entry.start, entry.stop), entry.length)


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
        if push.absent and _is_absent(push.absent, entry):
            found.append(None)
        elif in_arena:
            found.append(bucket.gradients(sender, entry))
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
    return own.clip, [(own.checked(entry), entry) for entry in body.entries]
