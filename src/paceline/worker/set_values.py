"""Sets stored values, by one worker and between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.net.call import Call
from paceline.tensors import to_frame
from paceline.wire import messages as m
from paceline.worker.block import WorkerBlock
from paceline.worker.plan import CallPlan, CallStep
from paceline.worker.session import Session


def set_values(
    session: Session, store: str, plan: CallPlan, values: Sequence[torch.Tensor], wait: Callable[[CallStep], None]
) -> None:
    """Set the values of a plan's keys on their owners. When it returns, the owners have them.

    Args:
        session: this worker's connection to the job.
        store: name of the store.
        plan: plan of the keys.
        values: one per key, in its shape.
        wait: waits for this worker's own requests on the keys of a step.
    """
    calls: list[Call] = []
    for step in plan.steps:
        wait(step)
        found: dict[int, tuple[list[m.Entry], list[Any]]] = {}
        for (block, index), value in zip(step.places, (values[position] for position in step.positions), strict=True):
            flat = value.detach().to("cpu", block.dtype).contiguous().view(-1)
            for server, entry, start in _located(block, index):
                entries, frames = found.setdefault(server, ([], []))
                entries.append(entry)
                frames.append(to_frame(flat[start : start + entry.length]))
        for server, (entries, frames) in found.items():
            calls.append(session.ask_server(server, m.SetValues(store, entries), "setting values", frames))
        step.set_fresh(False)
    session.wait(calls)


def _located(block: WorkerBlock, key: int) -> list[tuple[int, m.Entry, int]]:
    """Return (server, range, first element of the key in the range) for each part of a key."""
    return [
        (
            block.layout.buckets[index].server,
            m.Entry(block.spec.block, index, part.start, part.length, 0),
            part.key_start,
        )
        for index in sorted(block.buckets_of(key))
        for part in block.layout.buckets[index].parts
        if part.key == key
    ]
