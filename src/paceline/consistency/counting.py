"""How many samples the workers behind an update have: who knows, and who weighs without knowing."""

from __future__ import annotations

from collections.abc import Mapping

WAY_OUT = (
    "If batches differ, set optimizer.samples to the size of each batch, give batch_dim=, or take the batches from a "
    "sampler of paceline.data"
)
"""Advice where numbers of samples are not certain."""

EQUALLY = f"so all workers weigh equally, as with DistributedDataParallel. {WAY_OUT}"

Inputs = Mapping[int, str | None]
"""By worker with samples: None if the number of its samples is certain, else the shapes of its inputs."""


def knows(inputs: Inputs) -> bool:
    """Return whether the workers behind a contribution know their samples; a sum knows them if one worker did."""
    return not inputs or None in inputs.values()


def doubt_of(inputs: Inputs) -> str:
    """Return the warning that is due where not all workers know their samples; empty: none is."""
    unknown = {worker: shapes for worker, shapes in sorted(inputs.items()) if shapes is not None}
    if not unknown:
        return ""
    one, shapes = next(iter(unknown.items()))
    if len(unknown) < len(inputs):
        other = min(inputs.keys() - unknown.keys())
        return (
            f"worker {other} knows how many samples its batch has, and worker {one} does not, so worker {one} weighs as "
            f"the workers that know do in the mean. {WAY_OUT}, on every worker"
        )
    other = next((worker for worker, others in unknown.items() if others != shapes), one)
    if other == one:
        return ""
    return (
        f"inputs are {shapes or 'unknown'} on worker {one} and {unknown[other] or 'unknown'} on worker {other}, {EQUALLY}"
    )
