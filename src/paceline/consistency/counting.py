"""Compares how the workers behind an update count: all weigh by samples, or all by labels, or all alike."""

from __future__ import annotations

from collections.abc import Mapping

ALIKE = (
    "so all workers weigh alike, as with DistributedDataParallel. If batches differ, set optimizer.samples to the size "
    "of each batch, give batch_dim=, or take the batches from a sampler of paceline.data"
)
"""Advice where numbers of samples are not certain."""

Inputs = Mapping[int, str | None]
"""By worker with samples: None if the number of its samples is certain, :data:`LABELS` if it weighs by the labels of
its losses, else the shapes of its inputs."""

LABELS = "(labels)"
"""Stands for the shapes of inputs where a worker weighs by labels; no shapes are written so."""

_COUNTS = {None: "counts the samples of its batches", LABELS: "counts the labels of its losses"}
_ALIKE = "does not know their number"


def mixture_of(inputs: Inputs) -> str:
    """Return why pushes cannot be weighed: only some workers know what they have, or not all count the same thing."""
    first: dict[str, int] = {}
    for worker in sorted(inputs):
        first.setdefault(_COUNTS.get(inputs[worker], _ALIKE), worker)
    if len(first) < 2:
        return ""
    one, other = sorted(first, key=(*_COUNTS.values(), _ALIKE).index)[:2]
    return f"worker {first[one]} {one}, and worker {first[other]} {other}"


def difference_of(inputs: Inputs) -> str:
    """Return which two workers weigh alike although the shapes of their inputs differ; empty: there are none."""
    known = [(worker, shapes) for worker, shapes in sorted(inputs.items()) if shapes not in _COUNTS]
    first, shapes = known[0] if known else (0, "")
    for worker, others in known[1:]:
        if others != shapes:
            return f"inputs are {shapes or 'unknown'} on worker {first} and {others or 'unknown'} on worker {worker}"
    return ""
