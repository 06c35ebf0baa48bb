"""Requests on the state and the counters of a store, and commands that users register.

Optimizer state is read and set key by key, so that it fits any number of servers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from paceline import extensions
from paceline.compression.base import UNSENT
from paceline.config import Settings
from paceline.errors import ProtocolError
from paceline.extensions import register
from paceline.layout.tensors import state_dtype_name, state_from_frame, to_frame
from paceline.net.base import Frames
from paceline.server.bucket import Slot, StoredBucket
from paceline.server.bucket_store import check_once
from paceline.server.hosted import HostedStores, Result, ServerState
from paceline.server.members import Asker
from paceline.server.own import OwnStore
from paceline.updaters import Piece
from paceline.wire import messages as m


class CommandContext(Protocol):
    """The part of a server that a command may use."""

    settings: Settings
    stores: HostedStores


#: ``command(context, body)``: what it returns is sent back. ``KVStore.send_command_to_servers(name, body)`` runs it.
CommandFn: TypeAlias = Callable[[CommandContext, str], str]


@register("command", "ping")
def _ping(context: CommandContext, body: str) -> str:
    return body


@register("command", "log_level")
def _set_log_level(context: CommandContext, body: str) -> str:
    logging.getLogger("paceline").setLevel(body.upper())
    return body.upper()


def command(host: ServerState, asker: Asker, body: m.Command, frames: Frames) -> m.Reply:
    """Run a registered command."""
    run: CommandFn = extensions.find("command", body.head)
    return m.CommandAnswer(run(host, body.body))


def ask_stats(host: ServerState, asker: Asker, body: m.AskStats, frames: Frames) -> m.Reply:
    """Answer with the counters of a store."""
    return m.StatsAre(json.dumps(host.stores[body.store].own.report()))


# ---- state -----------------------------------------------------------------------------------------------------------


def get_state(host: ServerState, asker: Asker, body: m.GetState, frames: Frames) -> Result:
    """Answer with the state of ranges, each of one key, as one worker saves it."""
    own, worker = host.stores[body.store].own, asker.rank
    check_once(body.entries, "asked for")
    items: list[m.StateItem] = []
    found: list[object] = []
    for entry in body.entries:
        bucket = own.get(entry.block, entry.bucket)
        for slot, piece, offset in _located(own, entry):
            state = slot.updater.state(piece) | _unsent(own, worker, bucket, slice(offset, offset + piece.length))
            for name, tensor in state.items():
                shape, dtype = list(tensor.shape), state_dtype_name(tensor.dtype)
                items.append(m.StateItem(entry.block, entry.bucket, offset, piece.length, name, dtype, shape))
                found.append(to_frame(tensor.contiguous()))
    return m.StateIs(items), found


def _unsent(own: OwnStore, worker: int, bucket: StoredBucket, part: slice) -> dict[str, torch.Tensor]:
    """Return stored minus known values in double precision, so that known plus unsent is the value, bit for bit."""
    known = bucket.snapshots.get(bucket.slots[0].rule.unit[worker])
    if "pull" not in own.codecs or known is None:
        return {}
    return {UNSENT: bucket.values[part].double() - known[part].double()}


def set_state(host: ServerState, asker: Asker, body: m.SetState, frames: Frames) -> m.Reply:
    """Set the state of ranges, as one worker has loaded it.

    Raises:
        ProtocolError: frames that do not fit their items.
        ValueError: state that the optimizer does not have.
    """
    own, worker, items = host.stores[body.store].own, asker.rank, body.items
    if len(items) != len(frames):
        raise ProtocolError(f"{len(items)} items of state with {len(frames)} frames")
    tensors = [state_from_frame(frame, item.dtype, item.shape) for item, frame in zip(items, frames, strict=True)]
    for item, tensor in zip(items, tensors, strict=True):
        if item.name == UNSENT and (tensor.dtype != torch.float64 or tensor.shape != (item.length,)):
            raise ValueError(f"{UNSENT} values are float64 ({item.length},), not {tensor.dtype} {tuple(tensor.shape)}")
    for item, tensor in zip(items, tensors, strict=True):
        for slot, piece, offset in _located(own, item):
            flat = tensor.dim() == 1 and tensor.numel() == item.length
            part = tensor[offset - item.start : offset - item.start + piece.length] if flat else tensor
            if item.name == UNSENT:
                _set_unsent(own, worker, own.get(item.block, item.bucket), offset, part)
            else:
                slot.updater.load_state(piece, {item.name: part})
    return m.Done()


def _set_unsent(own: OwnStore, worker: int, bucket: StoredBucket, start: int, unsent: torch.Tensor) -> None:
    """Set the stored values to a worker's known values, which it has loaded too, plus the difference not sent to it."""
    if "pull" in own.codecs:
        bucket.keep_first_version(bucket.slots[0].rule.unit, is_coded=True)
    part = slice(start, start + unsent.numel())
    bucket.values[part].copy_(bucket.visible(own.units[worker])[part].double() + unsent)


def _located(own: OwnStore, span: m.Span) -> list[tuple[Slot, Piece, int]]:
    """Return (slot, piece inside the slot, start inside the bucket) of all pieces that a range covers."""
    found = []
    for slot in own.checked(span).slots_over(span):
        at = slot.span.start
        for piece in slot.updater.pieces:
            first, last = max(span.start, at + piece.start), min(span.stop, at + piece.start + piece.length)
            if first < last:
                whole = last - first == piece.length
                inner = Piece(piece.key, first - at, last - first, piece.shape if whole else ())
                found.append((slot, inner, first))
    return found
