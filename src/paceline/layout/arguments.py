"""Checks the arguments of a store's methods. Every error names the key."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from paceline.errors import KeyMismatchError
from paceline.layout.keys import Key, Keys, Values, by_key
from paceline.naming import suggestion

logger = logging.getLogger(__name__)

#: Dtypes of gradients that codecs encode.
COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)


def known_keys(keys: Collection[Key], values: Mapping[Key, torch.Tensor]) -> None:
    """Raise for keys that were not initialised.

    Raises:
        KeyMismatchError: names the key and the nearest known one.
    """
    for key in keys:
        if key not in values:
            raise KeyMismatchError(f"key {key!r} is not initialised: call init first{hint(key, values)}")


def hint(key: Key, known: Collection[Key]) -> str:
    """Return the end of an error about an unknown key: the nearest known one."""
    if not known:
        return "; the store is empty"
    twin = next((one for one in known if str(one) == str(key)), None)
    if twin is not None:
        return f"; there is {twin!r}, but that is {type(twin).__name__} and this is {type(key).__name__}"
    return suggestion(str(key), [str(one) for one in known])


def note_ignored(key: Key, noted: set[Key]) -> None:
    """Log once per key that a pull does not change a row-sparse target."""
    if key not in noted:
        noted.add(key)
        logger.warning(
            "pull of key %r does not change its row-sparse out; use row_sparse_pull for some rows, or "
            "ignore_sparse=False for all of them", key,
        )  # fmt: skip


def pushes(values: Mapping[Key, torch.Tensor], pushed: Mapping[Key, Sequence[torch.Tensor]]) -> None:
    """Raise for pushes of unknown keys, wrong shapes or wrong dtypes.

    Raises:
        KeyMismatchError: unknown key.
        ValueError: wrong shape, dtype or kind of sparsity.
    """
    known_keys(pushed, values)
    for key, devices in pushed.items():
        for one in devices:
            same_shape(key, one, values[key].shape, "pushed")
            if one.dtype != values[key].dtype:
                raise ValueError(f"key {key!r} has dtype {values[key].dtype}, but the pushed value has {one.dtype}")
            if one.is_sparse and one.sparse_dim() != 1:
                raise ValueError(f"key {key!r}: sparse values need 1 sparse dimension (rows), not {one.sparse_dim()}")


def outputs(values: Mapping[Key, torch.Tensor], outs: Mapping[Key, Sequence[torch.Tensor]]) -> None:
    """Raise for targets of unknown keys or wrong shapes.

    Raises:
        KeyMismatchError: unknown key.
        ValueError: wrong shape.
    """
    known_keys(outs, values)
    for key, targets in outs.items():
        for one in targets:
            same_shape(key, one, values[key].shape, "out")


def chosen_rows(
    values: Mapping[Key, torch.Tensor], outs: Mapping[Key, Sequence[torch.Tensor]], key: Keys, row_ids: Values | None
) -> dict[Key, list[torch.Tensor]]:
    """Return sorted distinct row numbers for each target of each key of a ``row_sparse_pull``.

    Raises:
        KeyMismatchError: unknown key.
        ValueError: wrong shape; there are no row numbers, or they are not integers or out of range, or there is neither
            one tensor of them nor one per target.
    """
    if row_ids is None:
        raise ValueError("row_sparse_pull needs row_ids: the numbers of the rows to pull")
    ids = by_key(key, row_ids)
    outputs(values, outs)
    return {one: _row_ids(one, values[one], ids[one], len(targets)) for one, targets in outs.items()}


def _row_ids(key: Key, value: torch.Tensor, ids: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
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


def compressible(legs: Collection[str], key: Key, dtype: torch.dtype, by_rows: bool) -> None:
    """Raise for a key whose dtype the codecs of these legs do not support. Pushes of rows are never compressed.

    Raises:
        TypeError: names the key and its dtype.
    """
    if "pull" in legs and dtype != torch.float32:
        raise TypeError(
            f"key {key!r} is {dtype}, but compressed pulls need float32; compress pushes only "
            "(leg='push'), or keep this key in a store of its own"
        )
    if "push" in legs and dtype not in COMPRESSIBLE and not by_rows:
        raise TypeError(
            f"key {key!r} is {dtype}, but compressed pushes need float32, float16 or bfloat16; convert it, as in "
            "model.float(), leave out the compression, or keep this key in a store of its own"
        )


def same_shape(key: Key, one: torch.Tensor, shape: torch.Size, what: str) -> None:
    """Raise ValueError if a tensor does not have the shape of its key."""
    if one.shape != shape:
        raise ValueError(f"key {key!r} has shape {tuple(shape)}, but the {what} value has {tuple(one.shape)}")
