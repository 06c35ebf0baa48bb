"""Requests that push, and those that clip what was pushed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import msgspec

from paceline.errors import ProtocolError
from paceline.net.base import Frames
from paceline.server.answers import answer_push, answer_sum
from paceline.server.asker import Asker, Handlers
from paceline.server.clip import ClipSink, Located
from paceline.server.forward.store import ForwardStore
from paceline.server.hosted import HostedStores
from paceline.server.push_request import PushRequest
from paceline.server.pushed_values import values_of, values_of_sum
from paceline.server.sums import check_sum, push_sum
from paceline.updaters import StepOptions, check_numbers
from paceline.wire import messages as m

_options_decoder = msgspec.msgpack.Decoder(StepOptions)


@lru_cache(maxsize=1024)
def _options(encoded: bytes) -> StepOptions | None:
    """Decode options; the same bytes give the same object, so that a change is seen by identity."""
    if not encoded:
        return None
    options = _options_decoder.decode(encoded)
    check_numbers(options.groups, options.keys)
    return options


class Pushes:
    """Handles pushes: each is checked as a whole before any of it counts.

    Args:
        stores: of this server.
    """

    def __init__(self, stores: HostedStores) -> None:
        self._stores = stores
        self.of_workers: Handlers = {m.Push: self._push, m.AskNorm: self._ask_norm, m.Commit: self._commit}
        self.of_servers: Handlers = {m.PushSum: self._push_sum}

    def _push(self, asker: Asker, push: m.Push, frames: Frames) -> None:
        hosted = self._stores[push.store]
        holder, codecs = hosted.holder(push), hosted.own.codecs
        store = holder.store
        buckets = holder.check_push(asker.rank, push)
        options = _options(push.options)
        values = values_of(push, asker.rank, buckets, frames, codecs.get("push"))
        answer, knows = partial(answer_push, asker, store, push), push.want and "pull" in codecs
        with PushRequest(asker.rank, answer, asker.fail, push.want, push.shared, knows) as request:
            for bucket, entry, value in zip(buckets, push.entries, values, strict=True):
                store.push(bucket, entry, value, push, options, request)
        if isinstance(holder, ForwardStore):
            holder.flush()
        store.received_bytes += asker.network_bytes(frames)

    def _push_sum(self, asker: Asker, push: m.PushSum, frames: Frames) -> None:
        hosted = self._stores[push.store]
        for share in push.shares:
            hosted.check_forwarder(asker.rank, share.worker)
        store, buckets = hosted.own.store, check_sum(hosted.own, push)
        values = values_of_sum(push, buckets, frames)
        options = _options(push.options)
        answer = partial(answer_sum, asker, store, push)
        with PushRequest(push.shares[0].worker, answer, asker.fail) as request:
            for index, (bucket, value) in enumerate(zip(buckets, values, strict=True)):
                push_sum(store, bucket, index, value, push, options, request)
        store.received_bytes += asker.network_bytes(frames)

    # ---- clipping --------------------------------------------------------------------------------------------------

    def _ask_norm(self, asker: Asker, body: m.AskNorm, frames: Frames) -> None:
        clip, located = self._located(body)
        clip.ask(asker.rank, located, asker.reply)

    def _commit(self, asker: Asker, body: m.Commit, frames: Frames) -> m.Reply:
        clip, located = self._located(body)
        clip.commit(asker.rank, located, body.factor, body.skip)
        return m.Done()

    def _located(self, body: m.AskNorm | m.Commit) -> tuple[ClipSink, Sequence[Located]]:
        """Return the sink that holds cohorts, and the ranges that a request is about, with their buckets.

        Raises:
            ProtocolError: the store does not clip, or an entry lies outside of its bucket.
        """
        own = self._stores[body.store].own
        if own.clip is None:
            raise ProtocolError(f"store {body.store!r} does not clip; open it with a largest norm")
        return own.clip, [(own.store.buckets.checked(entry), entry) for entry in body.entries]
