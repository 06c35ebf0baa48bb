"""Requests that set a store up: open it, initialise its buckets, set its updater and codecs, map memory."""

from __future__ import annotations

import os

import msgspec

from paceline.config import Settings
from paceline.consistency import Policy
from paceline.errors import ProtocolError
from paceline.extensions import split
from paceline.net.base import Frames
from paceline.server.admission import check_clipping
from paceline.server.asker import Asker, Handlers
from paceline.server.forward.sink import AskFn
from paceline.server.forward.store import ForwardStore
from paceline.server.hosted import HostedStore, HostedStores
from paceline.server.members import Members
from paceline.server.own import OwnStore
from paceline.tensors import dtype_of, from_frame
from paceline.updaters import UpdaterSpec
from paceline.wire import messages as m

_spec_decoder = msgspec.msgpack.Decoder(UpdaterSpec)


class StoreSetup:
    """Handles requests that set stores up.

    Args:
        settings: of the server.
        members: of the job.
        stores: of this server.
        ask: sends a request to another server.
    """

    def __init__(self, settings: Settings, members: Members, stores: HostedStores, ask: AskFn) -> None:
        self._settings, self._members, self._stores, self._ask = settings, members, stores, ask
        self.of_workers: Handlers = {
            m.OpenStore: self._open,
            m.Init: self._init,
            m.SetUpdater: self._set_updater,
            m.SetCompression: self._set_compression,
            m.MapArena: self._map_arena,
            m.AskValues: self._ask_values,
            m.ForwardBuckets: self._forward_buckets,
        }

    def _open(self, asker: Asker, body: m.OpenStore, frames: Frames) -> m.Reply:
        known = self._stores.get(body.store)
        if known is None:
            self._stores.open(body.store, self._new_store(body))
        elif known.opened != body:
            raise ValueError(
                f"worker {asker.rank} opens store {body.store!r} as {_describe(body)}, but it is open as "
                f"{_describe(known.opened)}; create the same stores in the same order on every worker"
            )
        return m.Done()

    def _new_store(self, body: m.OpenStore) -> HostedStore:
        num_workers, members = self._settings.num_workers, self._members
        policy = _policy(body)
        policy.check(num_workers)
        check_clipping(body.clip_norm, policy)
        allowed = split(self._settings.allow)
        share = self._settings.shared_memory and members.has_neighbours
        hosts, clips = members.worker_hosts, body.clip_norm != 0
        own = OwnStore(body.store, policy, body.mean, num_workers, allowed, share, hosts, clips)
        merge = members.local_merge(policy.unit_of(num_workers) if body.local_merge else range(num_workers))
        forward = None
        if any(merge.forwarded_by(members.rank, worker) for worker in range(num_workers)):
            forward = ForwardStore(body.store, policy, body.mean, merge, members.rank, share, self._ask)
        return HostedStore(body, members.rank, own, forward, merge)

    def _init(self, asker: Asker, body: m.Init, frames: Frames) -> m.Reply:
        if len(frames) != len(body.buckets):
            raise ProtocolError(f"{len(body.buckets)} buckets with {len(frames)} frames of values")
        dtype = dtype_of(body.dtype)
        pairs = zip(body.buckets, frames, strict=True)
        values = [from_frame(frame, dtype, bucket.length) for bucket, frame in pairs]
        self._stores[body.store].own.init(body.block, body.buckets, values, body.answers)
        return m.Done()

    def _set_updater(self, asker: Asker, body: m.SetUpdater, frames: Frames) -> m.Reply:
        hosted, spec = self._stores[body.store], _spec_decoder.decode(body.spec)
        hosted.own.set_updater(spec, body.fresh)
        if hosted.forward is not None:
            hosted.forward.set_updater(spec)
        return m.Done()

    def _set_compression(self, asker: Asker, body: m.SetCompression, frames: Frames) -> m.Reply:
        params = msgspec.msgpack.decode(body.params, type=dict[str, bool | int | float | str])
        self._stores[body.store].own.set_compression(params, body.leg)
        return m.Done()

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _map_arena(self, asker: Asker, body: m.MapArena, frames: Frames) -> m.Reply:
        self._members.check_memory(asker.rank, body.pid)
        hosted = self._stores[body.store]
        held = [one.store.buckets for one in (hosted.own, hosted.forward) if one is not None]
        for buckets in [one for one in held if one.of_block(body.block)] or held[:1]:
            buckets.map_arena(asker.rank, body)
        return m.Done()

    def _ask_values(self, asker: Asker, body: m.AskValues, frames: Frames) -> m.Reply:
        fd, starts = self._stores[body.store].own.store.buckets.values_at(body.block) or (0, [])
        return m.ValuesAt(os.getpid(), fd, starts)

    def _forward_buckets(self, asker: Asker, body: m.ForwardBuckets, frames: Frames) -> m.Reply:
        forward = self._stores[body.store].forward
        if forward is None:
            raise ProtocolError(f"store {body.store!r} forwards nothing from server {self._members.rank}")
        forward.add_buckets(asker.rank, body)
        fd, starts = forward.store.buckets.values_at(body.block) or (0, [])
        return m.ValuesAt(os.getpid(), fd, starts)


def _policy(body: m.OpenStore) -> Policy:
    groups = tuple(tuple(group) for group in body.groups)
    bound = None if body.bound < 0 else body.bound
    age = None if body.age < 0 else body.age
    return Policy(body.merge, groups, body.first, bound, body.weighting, age, body.lr_scale)  # type: ignore[arg-type]


def _describe(body: m.OpenStore) -> str:
    merged = {"groups": f"groups {body.groups}", "first": f"the first {body.first}"}.get(body.merge, body.merge)
    bound = "no bound" if body.bound < 0 else f"bound {body.bound}"
    age = "no age limit" if body.age < 0 else f"age {body.age}"
    how = f"{'mean' if body.mean else 'sum'}, {'with' if body.local_merge else 'without'} local merge"
    how += f", norms up to {body.clip_norm:g}" if body.clip_norm else ""
    return f"merge {merged}, {bound}, weighting {body.weighting}, {age}, {how}, learning rate per {body.lr_scale}"
