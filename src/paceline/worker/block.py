"""A worker's block: the arena of the keys that one call initialised, and the state of each of its ranges."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from paceline.compression import Codec, CodecState
from paceline.errors import ProtocolError
from paceline.layout.interval_map import IntervalMap
from paceline.layout.local_merge import Route
from paceline.layout.placement import KeySize, Layout, place
from paceline.layout.ranges import Ranges, is_all, joined, within, without
from paceline.layout.tensors import copy_stream, dtype_of
from paceline.net.call import Call
from paceline.net.memory import Patchwork, SharedTensor, open_foreign, pin, unpin
from paceline.wire import messages as m


class Rounds:
    """Counts the rounds of each range of a bucket. Pure."""

    def __init__(self, length: int) -> None:
        self._rounds = IntervalMap(length, 0)

    def next(self, start: int, length: int) -> list[tuple[int, int, int]]:
        """Count a push of a range; returns its parts as (start, length, round), as few as possible."""
        rounds, stop = self._rounds, start + length
        if len(rounds.values) == 1 and length == rounds.length:
            rounds.values[0] += 1
            return [(0, length, rounds.values[0])]
        pushed = [(first, last, round + 1) for first, last, round in rounds.over(start, stop)]
        for one in pushed:
            rounds.put(*one)
        return [(first, last - first, round) for first, last, round in pushed]


#: If the list of requests of a bucket is longer, answered ones are removed: perhaps no caller has waited for them.
_MOST_SENDING = 16

#: Ranges of a bucket for which the codec's state is kept at least, however few keys the bucket has.
_MIN_CODEC_STATES = 64


@dataclass
class BucketSide:
    """The worker's side of one bucket."""

    rounds: Rounds
    versions: IntervalMap[int]
    """Versions of the values from servers that compress pulls; 0 until the server sends one."""
    sending: list[tuple[m.Span, Call]] = field(default_factory=list)
    """Requests that are not answered yet. Some answered ones may still be in the list."""
    codec_states: dict[tuple[int, int], CodecState] = field(default_factory=dict)
    """States of the codec of pushes, per range, the last used one last; residuals are views of the block's."""
    most_codec_states: int = _MIN_CODEC_STATES
    """Ranges beyond which the one that was used least recently is forgotten."""

    def forget_answered(self) -> None:
        """Remove the requests that were answered without an error."""
        self.sending = [(span, call) for span, call in self.sending if not call.done or call.error is not None]


class WorkerBlock:
    """The keys of one dtype that one ``init`` call initialised, in one flat arena.

    Args:
        spec: description that rank 0 has published.
        num_servers: number of servers of the job.
        shared: let servers of this host read gradients in place.
        still: values change only after this worker has pushed, so it may read those of servers of this host in place;
            else the servers write new values into this worker's memory.
        via: returns the server that pushes to an owner are sent to.

    Attributes:
        values: flat; the store's values, as this worker has read them last.
        grads: flat; the gradients that this worker pushes.
        routes: routes of the pushes of every bucket.
    """

    def __init__(
        self, spec: m.BlockSpec, num_servers: int, shared: bool, still: bool, via: Callable[[int], int]
    ) -> None:
        self.spec = spec
        self.dtype = dtype_of(spec.dtype)
        self.layout = layout_of(spec, num_servers)
        self.routes = [Route(one.server, one.server if spec.rows else via(one.server)) for one in self.layout.buckets]
        self.key_index = {key.name: index for index, key in enumerate(spec.keys)}
        self.patchwork = Patchwork(self.layout.numel, self.dtype)
        self.values = self.patchwork.tensor
        self.value_file: SharedTensor | None = None
        self.grad_file: SharedTensor | None = None
        if shared:
            self.grad_file = SharedTensor(self.layout.numel, self.dtype)
            if not still or not all(self.patchwork.can_patch(bucket.start) for bucket in self.layout.buckets):
                self.value_file = SharedTensor(self.layout.numel, self.dtype)
                self.values = self.value_file.tensor
        self._pinned: list[torch.Tensor] = []
        self._devices: set[torch.device] = set()
        """CUDA devices that copy from and to the arena."""
        self.grads = (
            torch.zeros(self.layout.numel, dtype=self.dtype, device="cpu")
            if self.grad_file is None
            else self.grad_file.tensor
        )
        self.buckets = [
            BucketSide(
                Rounds(bucket.length),
                IntervalMap(bucket.length, 0),
                most_codec_states=max(_MIN_CODEC_STATES, 2 * len(bucket.parts)),
            )
            for bucket in self.layout.buckets
        ]
        self.residuals: torch.Tensor | None = None
        """Residuals of the codec: flat, float32, as long as ``grads``; allocated at the first use."""
        self.mapped: set[int] = set()
        """Servers that read and write the arena in place."""
        self.fresh = [False] * len(spec.keys)
        """Keys whose ``values`` are up to date: a pull would bring the same."""
        self.missing: dict[int, Ranges] = {}
        """By bucket, ranges (start, stop) for which no worker had a gradient in the last answered push."""
        self._ranges: list[list[m.Span]] = [[] for _ in spec.keys]
        for index, bucket in enumerate(self.layout.buckets):
            for part in bucket.parts:
                self._ranges[part.key].append(m.Span(spec.block, index, part.start, part.length))

    def numel(self, key: int) -> int:
        """Return the number of stored elements of a key."""
        return _stored(self.spec, self.spec.keys[key])

    def _view(self, arena: torch.Tensor, key: int) -> torch.Tensor:
        start = self.layout.key_starts[key]
        shape = [1] if self.spec.answers == "merged" else self.spec.keys[key].shape
        return arena[start : start + self.numel(key)].view(shape)

    def value_of(self, key: int) -> torch.Tensor:
        """Return the arena's view of a key's value, in its shape."""
        return self._view(self.values, key)

    def grad_of(self, key: int) -> torch.Tensor:
        """Return the arena's view of a key's gradient, in its shape."""
        return self._view(self.grads, key)

    def ranges(self, keys: Sequence[int]) -> list[m.Span]:
        """Return the ranges of keys; adjacent ranges in one bucket are joined."""
        found: list[m.Span] = []
        for one in sorted(one for key in keys for one in self._ranges[key]):
            last = found[-1] if found else None
            if last is not None and last.bucket == one.bucket and last.stop == one.start:
                found[-1] = m.Span(*last.place, last.start, last.length + one.length)
            else:
                found.append(one)
        return found

    def is_missing(self, key: int) -> bool:
        """Return whether no worker had a gradient of a key in its last answered push."""
        return bool(self.missing) and all(
            is_all(within(self.missing.get(one.bucket, ()), one.start, one.stop), one.length)
            for one in self._ranges[key]
        )

    def note_absent(self, entry: m.Entry, absent: Sequence[m.Span]) -> None:
        """Record for which ranges of a push no worker had a gradient, in place of the record of the last push."""
        if not absent and not self.missing:
            return
        mine = [
            one for one in absent if one.place == entry.place and entry.start <= one.start <= one.stop <= entry.stop
        ]
        others = without(self.missing.pop(entry.bucket, ()), entry.start, entry.stop)
        found = joined([*others, *((one.start, one.stop) for one in mine)])
        if found:
            self.missing[entry.bucket] = found

    def buckets_of(self, key: int) -> set[int]:
        """Return the buckets that hold elements of a key."""
        return {one.bucket for one in self._ranges[key]}

    def parts_of(self, key: int) -> list[tuple[int, m.Span, int]]:
        """Return (server, range, first element of the key in the range) for each part of a key."""
        return [
            (bucket.server, m.Span(self.spec.block, index, part.start, part.length), part.key_start)
            for index, bucket in ((index, self.layout.buckets[index]) for index in sorted(self.buckets_of(key)))
            for part in bucket.parts
            if part.key == key
        ]

    def arena_slice(self, span: m.Span) -> slice:
        """Return the slice of the arena that is a range of a bucket."""
        first = self.layout.buckets[span.bucket].start
        return slice(first + span.start, first + span.stop)

    def codec_state(self, codec: Codec, span: m.Span) -> CodecState:
        """Return the codec's state of a range.

        Residuals lie in one arena, so that they stay with their elements however pushes are cut. The rest of a codec's
        state (a start vector, a count of dropped elements) is forgotten for ranges that were not pushed for long.
        """
        side = self.buckets[span.bucket]
        states = side.codec_states
        state = states.pop((span.start, span.length), None)
        if state is None:
            state = codec.new_state(span.length)
            if state.residual is not None:
                state.residual = self.residual_arena()[self.arena_slice(span)]
        states[span.start, span.length] = state
        if len(states) > side.most_codec_states:
            del states[next(iter(states))]
        return state

    def residual_arena(self) -> torch.Tensor:
        """Return all residuals; 0 where the codec has sent everything."""
        if self.residuals is None:
            self.residuals = torch.zeros(self.layout.numel, dtype=torch.float32, device="cpu")
        return self.residuals

    def forget_codec_states(self) -> None:
        """Reset the state of the codec of pushes; residuals become 0."""
        if self.residuals is not None:
            self.residuals.zero_()
        for side in self.buckets:
            side.codec_states.clear()

    def residual_of(self, key: int) -> torch.Tensor:
        """Return the arena's view of a key's residual, in its shape."""
        return self._view(self.residual_arena(), key)

    def outstanding(self, span: m.Span) -> list[Call]:
        """Return the requests on a range that are not answered yet."""
        side = self.buckets[span.bucket]
        if not side.sending:
            return []
        side.forget_answered()
        return [call for sent, call in side.sending if sent.overlaps(span)]

    def note_sent(self, span: m.Span, call: Call) -> None:
        """Record a request on a range."""
        side = self.buckets[span.bucket]
        if len(side.sending) >= _MOST_SENDING:
            side.forget_answered()
        side.sending.append((span, call))

    def look_at(self, indices: Sequence[int], found: m.ValuesAt) -> None:
        """Map a server's values of some buckets, in place of this worker's copy.

        Raises:
            OSError: they cannot be mapped.
            ProtocolError: the server does not have them in shared memory.
        """
        if len(indices) != len(found.starts):
            raise ProtocolError(f"the server has {len(found.starts)} of {len(indices)} buckets in shared memory")
        buckets = [self.layout.buckets[index] for index in indices]
        ends = [start + bucket.length for start, bucket in zip(found.starts, buckets, strict=True)]
        file = open_foreign(found.pid, found.fd, max(ends) * self.dtype.itemsize)
        try:
            for start, bucket in zip(found.starts, buckets, strict=True):
                self.patchwork.patch(bucket.start, bucket.length, file, start)
        finally:
            os.close(file)

    def pin(self, devices: Collection[torch.device]) -> None:
        """Lock the arena in memory, so that these CUDA devices can copy from and to it asynchronously."""
        self._devices.update(devices)
        if not self._pinned:
            self._pinned = [memory for memory in (self.values, self.grads) if pin(memory, next(iter(devices)))]

    def detach(self) -> None:
        """Replace mapped values by a copy, which servers do not change."""
        for device in self._devices:
            with contextlib.suppress(RuntimeError):  # a device that has failed copies nothing any more
                copy_stream(device).synchronize()
        for memory in self._pinned:
            unpin(memory)
        self._pinned, self._devices = [], set()
        self.patchwork.detach()

    def close(self) -> None:
        """Release the shared memory."""
        for file in (self.value_file, self.grad_file):
            if file is not None:
                file.close()


def layout_of(spec: m.BlockSpec, num_servers: int) -> Layout:
    """Place the keys of a block. The spec determines the result, so it is the same on every worker."""
    keys = [KeySize(key.name, _stored(spec, key), key.tag) for key in spec.keys]
    return place(
        keys,
        num_servers,
        bound=spec.bound,
        largest=spec.largest,
        whole=spec.whole,
        policy=spec.policy,  # type: ignore[arg-type]
        loads=spec.loads,
        speeds=spec.speeds,
    )


def bucket_specs(spec: m.BlockSpec, layout: Layout, server: int) -> list[m.BucketSpec]:
    """Return the descriptions of one server's buckets, for that server."""
    found = []
    for index, bucket in enumerate(layout.buckets):
        if bucket.server == server:
            keys = [spec.keys[part.key] for part in bucket.parts]
            lengths = [part.length for part in bucket.parts]
            shapes = [key.shape if _stored(spec, key) == n else [] for key, n in zip(keys, lengths, strict=True)]
            offsets = [part.key_start for part in bucket.parts]
            found.append(m.BucketSpec(index, bucket.length, [key.name for key in keys], lengths, shapes, offsets))
    return found


def _stored(spec: m.BlockSpec, key: m.KeySpec) -> int:
    """Return the number of stored elements of a key; 1 if rows are only merged, because then no values are stored."""
    return 1 if spec.answers == "merged" else math.prod(key.shape)
