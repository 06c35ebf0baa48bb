"""Converts the state of keys to named tensors for a file and plain data for its manifest, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.keys import Key


def flatten(
    states: Mapping[Key, Mapping[str, Any]], prefix: str
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return the tensors of a state by name, and the plain data that :func:`restore` needs.

    Args:
        states: per key, tensors and numbers by name.
        prefix: prefix of the tensors' names.
    """
    tensors: dict[str, torch.Tensor] = {}
    keys = []
    for key, state in states.items():
        names = sorted(name for name, value in state.items() if isinstance(value, torch.Tensor))
        tensors |= {f"{prefix}{key}/{name}": state[name] for name in names}
        numbers = {name: value for name, value in state.items() if name not in names}
        keys.append({"key": key, "tensors": names, "numbers": numbers})
    return tensors, keys


def restore(
    tensors: Mapping[str, torch.Tensor], keys: Sequence[Mapping[str, Any]], prefix: str
) -> dict[Key, dict[str, Any]]:
    """Return the state from the results of :func:`flatten`."""
    return {
        one["key"]: {name: tensors[f"{prefix}{one['key']}/{name}"] for name in one["tensors"]} | one["numbers"]
        for one in keys
    }
