"""What a worker holds of the keys that one call initialised: the arena, and how far each range has come."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.compression import Codec, State
from paceline.errors import ProtocolError
from paceline.interval_map import IntervalMap, same
from paceline.local_merge import Route
from paceline.peer.call import Call
from paceline.placement import KeySize, Layout, place
from paceline.ranges import Ranges, is_all, within
from paceline.tensors import dtype_of
from paceline.transport.pinned import pin, unpin
from paceline.transport.shared import Patchwork, SharedTensor, open_foreign
from paceline.wire import messages as m
from paceline.worker.versions import Versions


@dataclass(frozen=True)
class BucketRange:
    """A part of a key, or several neighbouring ones, inside one bucket."""

    bucket: int
    start: int
    length: int


class Rounds:
    """How many rounds of each range of a bucket were pushed. Pure."""

    def __init__(self, length: int) -> None:
        self._rounds = IntervalMap(length, 0)

    def next(self, start: int, length: int) -> list[tuple[int, int, int]]:
        """Count a push; returns the (start, length, round) that it is made of, as few as possible."""
        rounds, stop = self._rounds, start + length
        if len(rounds) == 1 and length == rounds.length:
            rounds.values[0] += 1
            return [(0, length, rounds.values[0])]
        pushed = [(first, last, round + 1) for first, last, round in rounds.over(start, stop)]
        for one in pushed:
            rounds.set(*one)
        rounds.join(start - 1, stop + 1, same)
        return [(first, last - first, round) for first, last, round in pushed]


#: A bucket with more requests than that is looked through for answered ones, which nobody may have asked about.
_MOST_SENDING = 16


@dataclass
class _Sending:
    start: int
    stop: int
    call: Call


@dataclass
class BucketSide:
    """The worker's side of one bucket."""

    rounds: Rounds
    sending: list[_Sending] = field(default_factory=list)
    """Requests whose answers are still to come."""
    codec_states: dict[tuple[int, int], State] = field(default_factory=dict)
    """What the codec of pushes remembers, per range; residuals are views of the block's."""
    versions: Versions = field(default_factory=lambda: Versions(0))
    """What servers that compress pulls have told."""


class WorkerBlock:
    """The keys of one dtype that one ``init`` call brought, in one flat arena.

    Args:
        spec: as published by rank 0.
        num_servers: of the job.
        shared: let servers of this host read gradients in place.
        still: values change only after this worker has pushed, so it may look at those of servers of this host in
            place; else they write new ones into this worker's memory.
        via: tells for an owner of buckets to which server they are pushed.

    Attributes:
        values: flat; what the store holds, as far as this worker has read it.
        grads: flat; what this worker pushes.
        routes: how pushes of every bucket travel.
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
        self.grads = (
            torch.zeros(self.layout.numel, dtype=self.dtype) if self.grad_file is None else self.grad_file.tensor
        )
        self.buckets = [
            BucketSide(Rounds(bucket.length), versions=Versions(bucket.length)) for bucket in self.layout.buckets
        ]
        self.residuals: torch.Tensor | None = None
        """Flat float32, like ``grads``: what the codec has not sent yet, from the first use on."""
        self.mapped: set[int] = set()
        """Servers that read and write the arena in place."""
        self.fresh = [False] * len(spec.keys)
        """Keys whose range of ``values`` is what the store would answer."""
        self.missing: dict[int, Ranges] = {}
        """By bucket, ranges (start, stop) for which no worker had a gradient in the last answered push."""
        self._ranges: list[list[BucketRange]] = [[] for _ in spec.keys]
        for index, bucket in enumerate(self.layout.buckets):
            for part in bucket.parts:
                self._ranges[part.key].append(BucketRange(index, part.start, part.length))

    def numel(self, key: int) -> int:
        """Return the number of elements that are stored of a key."""
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

    def ranges(self, keys: Sequence[int]) -> list[BucketRange]:
        """Return where keys lie, neighbours in one bucket joined."""
        joined: list[BucketRange] = []
        for one in sorted((s for key in keys for s in self._ranges[key]), key=lambda s: (s.bucket, s.start)):
            last = joined[-1] if joined else None
            if last is not None and last.bucket == one.bucket and last.start + last.length == one.start:
                joined[-1] = BucketRange(last.bucket, last.start, last.length + one.length)
            else:
                joined.append(one)
        return joined

    def is_missing(self, key: int) -> bool:
        """Tell whether no worker had a gradient of a key in the last answered push of it."""
        return bool(self.missing) and all(
            is_all(within(self.missing.get(one.bucket, ()), one.start, one.start + one.length), one.length)
            for one in self._ranges[key]
        )

    def buckets_of(self, key: int) -> set[int]:
        """Return the buckets in which a key has elements."""
        return {one.bucket for one in self._ranges[key]}

    def arena_slice(self, bucket: int, start: int, length: int) -> slice:
        """Return where a range of a bucket lies in the arena."""
        first = self.layout.buckets[bucket].start + start
        return slice(first, first + length)

    def codec_state(self, codec: Codec, bucket: int, start: int, length: int) -> State:
        """Return what the codec remembers of a range.

        Residuals lie in one arena, so that they stay with their elements however pushes are cut.
        """
        states = self.buckets[bucket].codec_states
        if (start, length) not in states:
            state = states[start, length] = codec.new_state(length)
            if state.residual is not None:
                state.residual = self.residual_arena()[self.arena_slice(bucket, start, length)]
        return states[start, length]

    def residual_arena(self) -> torch.Tensor:
        """Return all residuals; 0 where nothing was held back."""
        if self.residuals is None:
            self.residuals = torch.zeros(self.layout.numel)
        return self.residuals

    def forget_codec_states(self) -> None:
        """Forget what the codec of pushes remembers; residuals become 0."""
        if self.residuals is not None:
            self.residuals.zero_()
        for side in self.buckets:
            side.codec_states.clear()

    def residual_of(self, key: int) -> torch.Tensor:
        """Return the arena's view of a key's residual, in its shape."""
        return self._view(self.residual_arena(), key)

    def outstanding(self, part: BucketRange) -> list[Call]:
        """Return the requests on a range that are not answered yet."""
        side = self.buckets[part.bucket]
        if not side.sending:
            return []
        side.sending = [sent for sent in side.sending if not sent.call.done or sent.call.error is not None]
        stop = part.start + part.length
        return [sent.call for sent in side.sending if sent.start < stop and part.start < sent.stop]

    def note_sent(self, part: BucketRange, call: Call) -> None:
        """Remember a request on a range."""
        side = self.buckets[part.bucket]
        if len(side.sending) >= _MOST_SENDING:
            side.sending = [sent for sent in side.sending if not sent.call.done or sent.call.error is not None]
        side.sending.append(_Sending(part.start, part.start + part.length, call))

    def look_at(self, indices: Sequence[int], found: m.ValuesAt) -> None:
        """Put the values that a server keeps of some buckets in the place of ours.

        Raises:
            OSError: they cannot be mapped.
            ProtocolError: they are not there.
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

    def pin(self) -> None:
        """Lock the arena in memory, so that CUDA devices copy from and to it by themselves."""
        self._pinned = [memory for memory in (self.values, self.grads) if pin(memory)]

    def detach(self) -> None:
        """Go on with a copy of the values that does not change any more."""
        for memory in self._pinned:
            unpin(memory)
        self._pinned = []
        self.patchwork.detach()

    def close(self) -> None:
        """Give up the shared memory."""
        for file in (self.value_file, self.grad_file):
            if file is not None:
                file.close()


def layout_of(spec: m.BlockSpec, num_servers: int) -> Layout:
    """Place the keys of a block; the same on every worker, because all of it is in the spec."""
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
    """Describe the buckets of one server to it."""
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
    """Return the number of elements that are stored of a key: one that stands for it where only rows are merged."""
    return 1 if spec.answers == "merged" else _numel(key.shape)


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
