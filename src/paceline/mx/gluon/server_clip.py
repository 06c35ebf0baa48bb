"""Clipping when servers step: servers clip if they merge pushes, else every worker clips before its push."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from paceline.kvstore.dist import DistStore
from paceline.mx.gluon.clip import GradientClip
from paceline.updaters import Options
from paceline.updaters.gradient import clip_of
from paceline.updaters.rows import sum_rows

Gradients: TypeAlias = Mapping[str, Sequence[torch.Tensor]]


def norm_for_servers(clip: GradientClip, store: DistStore, rows: bool) -> float:
    """Return the largest norm that a store's servers clip to; 0: there is no limit, or the workers clip.

    Args:
        clip: bounds of the gradients.
        store: a store whose servers step.
        rows: a parameter gets row-sparse gradients, or is kept as rows.

    Raises:
        ValueError: servers cannot clip this way.
    """
    if clip.norm is None or not _merges(store):
        return 0.0
    if clip.value is not None:
        raise ValueError(
            f"clip_grad_norm and clip_grad_value together: servers of a {store.type} store would take the norm before "
            "the values are clamped. Give one of them, or let the workers update, which dist_sync with dense gradients "
            "does: update_on_kvstore=False"
        )
    if rows and store.policy.merge == "groups":
        raise ValueError(
            f"clip_grad_norm in a {store.type} store needs dense gradients: use sparse=False for embeddings"
        )
    return clip.norm


class ServerClip:
    """A worker's part of clipping when servers step.

    Args:
        clip: bounds of the gradients.
        store: made with the norm of :func:`norm_for_servers`.
    """

    def __init__(self, clip: GradientClip, store: DistStore) -> None:
        self._clip, self._store = clip, store
        self._by_norm = clip.norm is not None
        self._by_servers = self._by_norm and _merges(store)

    def options(self, groups: list[Options]) -> list[Options]:
        """Return the options per param group; if servers clamp elements, with the bound."""
        value = self._clip.value
        if value is None or self._by_norm:
            return groups
        return [group | {"clip_gradient": min(value, clip_of(group) or math.inf)} for group in groups]

    def own(self, grads: Gradients) -> Gradients:
        """Return the gradients to push: unchanged if servers clip, else this worker's clipped sums over its devices."""
        if self._by_servers or not self._by_norm or not grads:
            return grads
        sums = {key: _sum(devices) for key, devices in grads.items()}
        factor = self._clip(list(sums.values()), 1.0)
        return {key: [one.mul_(factor)] for key, one in sums.items()}

    def exchange(self, grads: Gradients, outs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Push gradients, let the servers clip the round, and pull all values."""
        keys = list(grads)
        self._store.push(keys, list(grads.values()))
        if self._by_servers:
            self._store.clip_round()
        self._store.pull(keys, outs, ignore_sparse=False)


def _merges(store: DistStore) -> bool:
    return store.policy.merges_rounds


@torch.no_grad()
def _sum(devices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum over devices as a new tensor on the first device."""
    first = devices[0]
    if first.is_sparse:
        return sum_rows(devices, first.device)
    total = first.clone()
    for one in devices[1:]:
        total += one.to(total.device)
    return total
