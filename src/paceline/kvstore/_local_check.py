"""Checks of what callers pass to a store. Every message names the key."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from paceline.errors import KeyMismatchError
from paceline.kvstore.base import Key
from paceline.naming import suggestion


def same_kind(keys: Collection[Key], known: Collection[Key]) -> None:
    """Refuse int keys in a store of str keys and the other way round.

    Raises:
        TypeError: names both keys.
    """
    first = next(iter(known), None)
    for key in keys:
        if first is not None and type(key) is not type(first):
            raise TypeError(
                f"key {key!r} is {type(key).__name__}, but this store has {type(first).__name__} keys ({first!r})"
            )


def known_keys(keys: Collection[Key], values: Mapping[Key, torch.Tensor]) -> None:
    """Refuse keys that were not initialised.

    Raises:
        KeyMismatchError: names the key and the nearest known one.
    """
    same_kind(keys, values)
    for key in keys:
        if key not in values:
            hint = suggestion(str(key), [str(one) for one in values]) if values else "; the store is empty"
            raise KeyMismatchError(f"key {key!r} is not initialised: call init first{hint}")


def pushes(values: Mapping[Key, torch.Tensor], pushed: Mapping[Key, Sequence[torch.Tensor]]) -> None:
    """Refuse pushes of unknown keys, other shapes or other dtypes.

    Raises:
        KeyMismatchError: unknown key.
        ValueError: other shape, dtype or kind of sparsity.
    """
    known_keys(pushed, values)
    for key, devices in pushed.items():
        for one in devices:
            _same_shape(key, one, values[key], "pushed")
            if one.dtype != values[key].dtype:
                raise ValueError(f"key {key!r} has dtype {values[key].dtype}, but the pushed value has {one.dtype}")
            if one.is_sparse and one.sparse_dim() != 1:
                raise ValueError(f"key {key!r}: sparse values need 1 sparse dimension (rows), not {one.sparse_dim()}")


def outputs(values: Mapping[Key, torch.Tensor], outs: Mapping[Key, Sequence[torch.Tensor]]) -> None:
    """Refuse targets of unknown keys or other shapes.

    Raises:
        KeyMismatchError: unknown key.
        ValueError: other shape.
    """
    known_keys(outs, values)
    for key, targets in outs.items():
        for one in targets:
            _same_shape(key, one, values[key], "out")


def row_ids(key: Key, value: torch.Tensor, ids: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Return sorted distinct row numbers for each of ``count`` targets.

    Raises:
        ValueError: not integers, out of range, or neither one tensor nor one per target.
    """
    if len(ids) not in (1, count):
        raise ValueError(f"key {key!r} has {len(ids)} row_ids for {count} targets; give one, or one per target")
    rows = [torch.unique(one.detach().reshape(-1)) for one in ids]
    for one in rows:
        if one.is_floating_point() or one.dtype == torch.bool:
            raise ValueError(f"row_ids of key {key!r} have dtype {one.dtype}; row numbers are integers")
        if one.numel() and (int(one[0]) < 0 or int(one[-1]) >= value.shape[0]):
            raise ValueError(
                f"row_ids of key {key!r} reach from {one[0]} to {one[-1]}, but it has rows 0 to {value.shape[0] - 1}"
            )
    return [one.long() for one in (rows * count if len(rows) == 1 else rows)]


def float32_for_pulls(keys: Iterable[Key], dtypes: Iterable[torch.dtype]) -> None:
    """Refuse values that pulls cannot be compressed of.

    Raises:
        TypeError: names the key and its dtype.
    """
    for key, dtype in zip(keys, dtypes, strict=True):
        if dtype != torch.float32:
            raise TypeError(
                f"key {key!r} is {dtype}, but pulls are compressed, which takes float32; compress pushes only "
                "(leg='push'), or keep this key in a store of its own"
            )


def _same_shape(key: Key, one: torch.Tensor, value: torch.Tensor, what: str) -> None:
    if one.shape != value.shape:
        raise ValueError(f"key {key!r} has shape {tuple(value.shape)}, but the {what} value has {tuple(one.shape)}")
