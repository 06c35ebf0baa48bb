"""Requests that set a store up: open it, initialise its buckets, set its updater and codecs, map memory."""

from __future__ import annotations

import os

import msgspec

from paceline.consistency import Policy
from paceline.errors import ProtocolError
from paceline.extensions import split
from paceline.layout.tensors import dtype_of, from_frame
from paceline.net.base import Frames
from paceline.server.forward import ForwardStore
from paceline.server.hosted import HostedStore, ServerState
from paceline.server.members import Asker
from paceline.server.own import OwnStore
from paceline.updaters import UpdaterSpec
from paceline.wire import messages as m

_spec_decoder = msgspec.msgpack.Decoder(UpdaterSpec)


def open_store(host: ServerState, asker: Asker, body: m.OpenStore, frames: Frames) -> m.Reply:
    """Open a store; opening it again in the same way changes nothing."""
    known = host.stores.get(body.store)
    if known is None:
        host.stores.open(body.store, _new_store(host, body))
    elif known.opened != body:
        raise ValueError(
            f"worker {asker.rank} opens store {body.store!r} as {_describe(body)}, but it is open as "
            f"{_describe(known.opened)}; create the same stores in the same order on every worker"
        )
    return m.Done()


def _new_store(host: ServerState, body: m.OpenStore) -> HostedStore:
    num_workers, members = host.settings.num_workers, host.members
    policy = _policy(body)
    policy.check(num_workers)
    _check_clipping(body.clip_norm, policy)
    allowed = split(host.settings.allow)
    share = host.settings.shared_memory and members.has_neighbours
    hosts, clips = members.worker_hosts, body.clip_norm != 0
    own = OwnStore(body.store, policy, body.mean, num_workers, allowed, share, hosts, clips)
    merge = members.local_merge(policy.unit_of(num_workers) if body.local_merge else range(num_workers))
    forward = None
    if any(merge.forwarded_by(members.rank, worker) for worker in range(num_workers)):
        forward = ForwardStore(body.store, policy, body.mean, merge, members.rank, share, host.ask)
    return HostedStore(body, members.rank, own, forward, merge)


def init(host: ServerState, asker: Asker, body: m.Init, frames: Frames) -> m.Reply:
    """Initialise buckets of a block."""
    if len(frames) != len(body.buckets):
        raise ProtocolError(f"{len(body.buckets)} buckets with {len(frames)} frames of values")
    dtype = dtype_of(body.dtype)
    pairs = zip(body.buckets, frames, strict=True)
    values = [from_frame(frame, dtype, bucket.length) for bucket, frame in pairs]
    host.stores[body.store].own.init(body.block, body.buckets, values, body.answers)
    return m.Done()


def set_updater(host: ServerState, asker: Asker, body: m.SetUpdater, frames: Frames) -> m.Reply:
    """Set how a push changes values."""
    hosted, spec = host.stores[body.store], _spec_decoder.decode(body.spec)
    hosted.own.set_updater(spec, body.fresh)
    if hosted.forward is not None:
        hosted.forward.set_updater(spec)
    return m.Done()


def set_compression(host: ServerState, asker: Asker, body: m.SetCompression, frames: Frames) -> m.Reply:
    """Set the codec of a leg."""
    params = msgspec.msgpack.decode(body.params, type=dict[str, bool | int | float | str])
    host.stores[body.store].own.set_compression(params, body.leg)
    return m.Done()


# ---- memory ----------------------------------------------------------------------------------------------------------


def map_arena(host: ServerState, asker: Asker, body: m.MapArena, frames: Frames) -> m.Reply:
    """Map a worker's shared memory for a block."""
    host.members.check_memory(asker.rank, body.pid)
    hosted = host.stores[body.store]
    for part in [one for one in hosted.parts if one.has_block(body.block)] or [hosted.own]:
        part.map_arena(asker.rank, body)
    return m.Done()


def ask_values(host: ServerState, asker: Asker, body: m.AskValues, frames: Frames) -> m.Reply:
    """Answer where in shared memory the values of a block are."""
    fd, starts = host.stores[body.store].own.values_at(body.block) or (0, [])
    return m.ValuesAt(os.getpid(), fd, starts)


def forward_buckets(host: ServerState, asker: Asker, body: m.ForwardBuckets, frames: Frames) -> m.Reply:
    """Take buckets of other servers, to which pushes are forwarded from here."""
    forward = host.stores[body.store].forward
    if forward is None:
        raise ProtocolError(f"store {body.store!r} forwards nothing from server {host.members.rank}")
    forward.add_buckets(asker.rank, body)
    fd, starts = forward.values_at(body.block) or (0, [])
    return m.ValuesAt(os.getpid(), fd, starts)


def _policy(body: m.OpenStore) -> Policy:
    groups = tuple(tuple(group) for group in body.groups)
    bound = None if body.bound < 0 else body.bound
    age = None if body.age < 0 else body.age
    how = body.merge, groups, body.first, bound, body.weighting, age, body.lr_scale, body.grace_s
    return Policy(*how)  # type: ignore[arg-type]


def _describe(body: m.OpenStore) -> str:
    first = f"the first {body.first}" + (f" and those of {body.grace_s:g} s more" if body.grace_s else "")
    merged = {"groups": f"groups {body.groups}", "first": first}.get(body.merge, body.merge)
    bound = "no bound" if body.bound < 0 else f"bound {body.bound}"
    age = "no age limit" if body.age < 0 else f"age {body.age}"
    how = f"{'mean' if body.mean else 'sum'}, {'with' if body.local_merge else 'without'} local merge"
    how += f", norms up to {body.clip_norm:g}" if body.clip_norm else ""
    return f"merge {merged}, {bound}, weighting {body.weighting}, {age}, {how}, learning rate per {body.lr_scale}"


def _check_clipping(clip_norm: float, policy: Policy) -> None:
    """Refuse a store that clips but has no merged gradient to clip, or no usable norm.

    Raises:
        ValueError: the norm is no positive number, or pushes of one round are not merged.
    """
    if not 0 <= clip_norm < float("inf"):
        raise ValueError(f"gradients are clipped to a norm of {clip_norm}; it must be a positive number")
    if clip_norm and not policy.merges_rounds:
        raise ValueError(
            f"a store that merges pushes as {policy.merge!r} has no merged gradient to clip; clip in the worker"
        )
