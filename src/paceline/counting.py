"""Compares how the workers behind an update count their samples: all of them weigh by samples, or all weigh alike."""

from __future__ import annotations

from collections.abc import Mapping

ALIKE = (
    "so all workers weigh alike, as with DistributedDataParallel. If batches differ, set optimizer.samples to the size "
    "of each batch, give batch_dim=, or take the batches from a sampler of paceline.data"
)
"""Advice where numbers of samples are not certain."""

Inputs = Mapping[int, str | None]
"""By worker with samples: None if the number of its samples is certain, else the shapes of its inputs."""


def mixture_of(inputs: Inputs) -> str:
    """Return why pushes cannot be weighed: only some workers know how many samples they have. Empty: they can."""
    counts = min((worker for worker, shapes in inputs.items() if shapes is None), default=None)
    does_not = min((worker for worker, shapes in inputs.items() if shapes is not None), default=None)
    if counts is None or does_not is None:
        return ""
    return f"worker {counts} counts the samples of its batches, and worker {does_not} does not know their number"


def difference_of(inputs: Inputs) -> str:
    """Return which two workers weigh alike although the shapes of their inputs differ; empty: there are none."""
    known = [(worker, shapes) for worker, shapes in sorted(inputs.items()) if shapes is not None]
    first, shapes = known[0] if known else (0, "")
    for worker, others in known[1:]:
        if others != shapes:
            return f"inputs are {shapes or 'unknown'} on worker {first} and {others or 'unknown'} on worker {worker}"
    return ""
