"""Residuals of a worker's pushes, per key: the values that its codec has not sent yet."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.keys import Key
from paceline.worker.key_table import KeyTable


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

    Args:
        table: the store's keys.
        states: per key, the tensor ``residual``: float32, in the key's shape.

    Raises:
        KeyMismatchError: unknown key.
        ValueError: a tensor has a wrong name, shape or dtype. Then nothing is changed.
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
