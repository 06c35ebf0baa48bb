"""State of keys, flat: named tensors for a file, and plain data for its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.kvstore.base import Key


def flatten(
    states: Mapping[Key, Mapping[str, Any]], prefix: str = ""
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return the tensors of a state by name, and what is needed to put it together again.

    Args:
        states: per key, tensors and numbers by name.
        prefix: of the names of tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    keys = []
    for key, state in states.items():
        named = {name: f"{prefix}{key}/{name}" for name, value in state.items() if isinstance(value, torch.Tensor)}
        tensors |= {full: state[name] for name, full in named.items()}
        numbers = {name: value for name, value in state.items() if name not in named}
        keys.append({"key": key, "tensors": named, "numbers": numbers})
    return tensors, keys


def restore(tensors: Mapping[str, torch.Tensor], keys: Sequence[Mapping[str, Any]]) -> dict[Key, dict[str, Any]]:
    """Return the state that :func:`flatten` took apart."""
    return {one["key"]: {name: tensors[full] for name, full in one["tensors"].items()} | one["numbers"] for one in keys}
