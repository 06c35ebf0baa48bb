"""Reads and sets the optimizer's state of a distributed store: whole keys, on any number of servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from paceline.keys import Key
from paceline.net.base import Frames
from paceline.tensors import state_dtype_name, state_from_frame, to_frame
from paceline.wire import messages as m
from paceline.worker.block import BucketRange, WorkerBlock
from paceline.worker.key_table import KeyTable
from paceline.worker.session import Session

States = dict[Key, dict[str, torch.Tensor]]
_Parts = dict[Key, dict[str, list[tuple[int, torch.Tensor]]]]


def get_states(session: Session, store: str, table: KeyTable) -> States:
    """Return the optimizer's state of every key, joined from all servers."""
    parts: _Parts = {key: defaultdict(list) for key in table.keys}
    calls = []
    for block in table.blocks.values():
        for index, bucket in enumerate(block.layout.buckets):
            body = m.GetState(store, [m.Entry(block.spec.block, index, 0, bucket.length, 0)])
            done = partial(_take, parts, block)
            calls.append(session.ask_server(bucket.server, body, "optimizer state", (), done))
    session.wait(calls)
    return {key: {name: _joined(found) for name, found in state.items()} for key, state in parts.items()}


def _take(parts: _Parts, block: WorkerBlock, body: m.Body, frames: Frames) -> None:
    assert isinstance(body, m.StateIs)
    for item, frame in zip(body.items, frames, strict=True):
        for part in block.layout.buckets[item.bucket].parts:
            if part.start <= item.start < part.start + max(1, part.length):
                tensor = state_from_frame(frame, item.dtype, item.shape)
                key = block.spec.keys[part.key].name
                parts[key][item.name].append((part.key_start + item.start - part.start, tensor))


def _joined(parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Join the parts of a key's state. A state with a single element is the same on all servers."""
    ordered = [tensor for _, tensor in sorted(parts, key=lambda part: part[0])]
    return ordered[0] if len(ordered) == 1 or ordered[0].dim() == 0 else torch.cat(ordered)


def set_states(session: Session, store: str, table: KeyTable, states: Mapping[Key, Mapping[str, torch.Tensor]]) -> None:
    """Set the optimizer's state of keys on the servers that own them."""
    calls = []
    for (block, index), state in zip(table.locate(list(states)), states.values(), strict=True):
        for one in block.ranges([index]):
            bucket = block.layout.buckets[one.bucket]
            key_start = next(part.key_start for part in bucket.parts if part.key == index)
            items, frames = _items(block, index, one, key_start, state)
            body = m.SetState(store, items)
            calls.append(session.ask_server(bucket.server, body, "setting optimizer state", frames))
    session.wait(calls)


def _items(
    block: WorkerBlock, index: int, one: BucketRange, key_start: int, state: Mapping[str, torch.Tensor]
) -> tuple[list[m.StateItem], list[Any]]:
    items, frames = [], []
    for name, tensor in state.items():
        whole = tensor.dim() == 0 or tensor.numel() != block.numel(index) or block.spec.whole
        part = (tensor if whole else tensor.reshape(-1)[key_start : key_start + one.length]).cpu().contiguous()
        dtype, shape = state_dtype_name(part.dtype), list(part.shape)
        items.append(m.StateItem(block.spec.block, one.bucket, one.start, one.length, name, dtype, shape))
        frames.append(to_frame(part))
    return items, frames
