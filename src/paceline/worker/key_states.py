"""Access of one worker to whole keys, between rounds: values, the optimizer's state, residuals, counters."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from paceline.compression.base import UNSENT
from paceline.layout.keys import Key
from paceline.layout.tensors import as_tensor, state_dtype_name, state_from_frame, to_frame
from paceline.net.base import Frames
from paceline.updaters import UpdaterSpec, check_state
from paceline.updaters.state_parts import COUNTERS
from paceline.wire import messages as m
from paceline.worker.block import WorkerBlock
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
    shapes = {
        key: block.value_of(index).shape for key, (block, index) in zip(parts, table.locate([*parts]), strict=True)
    }
    return {key: {name: _joined(found, shapes[key]) for name, found in state.items()} for key, state in parts.items()}


def _take(parts: _Parts, block: WorkerBlock, body: m.Body, frames: Frames) -> None:
    assert isinstance(body, m.StateIs)
    for item, frame in zip(body.items, frames, strict=True):
        for part in block.layout.buckets[item.bucket].parts:
            if part.start <= item.start < part.start + max(1, part.length):
                tensor = state_from_frame(frame, item.dtype, item.shape)
                key = block.spec.keys[part.key].name
                parts[key][item.name].append((part.key_start + item.start - part.start, tensor))


def _joined(parts: list[tuple[int, torch.Tensor]], shape: torch.Size) -> torch.Tensor:
    """Join the parts of a key's state, in the key's shape. A state with a single element is the same on all servers."""
    ordered = [tensor for _, tensor in sorted(parts, key=lambda part: part[0])]
    whole = ordered[0] if len(ordered) == 1 or ordered[0].dim() == 0 else torch.cat(ordered)
    return whole.view(shape) if whole.dim() == 1 and whole.numel() == shape.numel() else whole


def check_states(table: KeyTable, states: Mapping[Key, Mapping[str, Any]], spec: UpdaterSpec) -> None:
    """Raise if the servers cannot take an optimizer's state of keys.

    Raises:
        KeyMismatchError: a key is not initialised.
        ValueError: a tensor does not fit its key.
        TypeError: the servers hold no state of its dtype.
    """
    for (block, index), (key, state) in zip(table.locate(list(states)), states.items(), strict=True):
        tensors = {name: as_tensor(value) for name, value in state.items()}
        for one in tensors.values():
            state_dtype_name(one.dtype)
        check_state(key, block.value_of(index), tensors, spec)


def set_states(session: Session, store: str, table: KeyTable, states: Mapping[Key, Mapping[str, Any]]) -> None:
    """Set the optimizer's state of keys on the servers that own them."""
    calls = []
    for (block, index), state in zip(table.locate(list(states)), states.values(), strict=True):
        for server, one, key_start in block.parts_of(index):
            items, frames = _items(block, index, one, key_start, state)
            calls.append(session.ask_server(server, m.SetState(store, items), "setting optimizer state", frames))
    session.wait(calls)


def _items(
    block: WorkerBlock, index: int, one: m.Span, key_start: int, state: Mapping[str, Any]
) -> tuple[list[m.StateItem], list[Any]]:
    items, frames = [], []
    for name, value in state.items():
        tensor = as_tensor(value)  # a store of one process has plain numbers too
        is_counter = tensor.dim() == 0 and (name in COUNTERS or tensor is not value)
        by_element = not is_counter and tensor.numel() == block.numel(index)
        whole = not by_element or (block.spec.whole and name not in ("master", UNSENT))
        part = (tensor if whole else tensor.reshape(-1)[key_start : key_start + one.length]).cpu().contiguous()
        dtype, shape = state_dtype_name(part.dtype), list(part.shape)
        items.append(m.StateItem(*one.place, one.start, one.length, name, dtype, shape))
        frames.append(to_frame(part))
    return items, frames


def residuals(table: KeyTable) -> dict[Key, dict[str, torch.Tensor]]:
    """Return copies of the residuals of keys that have any: float32, in the shapes of the keys."""
    return {
        key.name: {"residual": block.residual_of(index).clone()}
        for block in table.blocks.values()
        if block.residuals is not None
        for index, key in enumerate(block.spec.keys)
    }


def set_residuals(table: KeyTable, states: Mapping[Key, Mapping[str, torch.Tensor]]) -> None:
    """Set the residuals of keys. Residuals of all other keys become 0.

    The state of a key is the tensor ``residual``: float32, in the key's shape.

    Raises:
        KeyMismatchError: unknown key.
        ValueError: a tensor has a wrong name, shape or dtype. Then no residual is changed.
    """
    places = table.locate(list(states))
    for (key, state), (block, index) in zip(states.items(), places, strict=True):
        for name, tensor in state.items():
            shape = block.value_of(index).shape
            if name != "residual" or tensor.shape != shape or tensor.dtype != torch.float32:
                raise ValueError(
                    f"codec state {name!r} of key {key!r} is {tensor.dtype} {tuple(tensor.shape)}, not 'residual', "
                    f"{torch.float32} {tuple(shape)}"
                )
    for block in table.blocks.values():
        block.forget_codec_states()
    for state, (block, index) in zip(states.values(), places, strict=True):
        for tensor in state.values():
            block.residual_of(index).copy_(tensor)


def merge_stats(answers: Sequence[m.Body]) -> dict[str, Any]:
    """Merge the counters of all servers. Updates, masses and drops become means over all slots."""
    reports = [json.loads(answer.body) for answer in answers if isinstance(answer, m.StatsAre)]
    slots = max(1, sum(report["slots"] for report in reports))
    staleness: Counter[int] = Counter()
    data_mass: Counter[int] = Counter()
    dropped: Counter[int] = Counter()
    for report in reports:
        staleness.update({int(age): number for age, number in report["staleness"].items()})
        data_mass.update({int(worker): mass / slots for worker, mass in report["data_mass"].items()})
        dropped.update({int(worker): number for worker, number in report["dropped"].items()})
    return {
        "updates": sum(report["updates"] for report in reports) / slots,
        "skipped": sum(report["skipped"] for report in reports) / slots,
        "staleness": dict(sorted(staleness.items())),
        "step_mass": sum(report["step_mass"] for report in reports) / slots,
        "data_mass": dict(sorted(data_mass.items())),
        "dropped": dropped.total() / slots,
        "dropped_by_worker": {worker: number / slots for worker, number in sorted(dropped.items())},
        "network_bytes": sum(report["received_bytes"] + report["sent_bytes"] for report in reports),
    }
