"""What a call of a distributed store is about: a plan and values that fit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.kvstore import _local_check as check
from paceline.kvstore.base import Key, Keys, Values, normalise
from paceline.kvstore.key_table import KeyTable
from paceline.kvstore.plan import Plan
from paceline.kvstore.row_traffic import own_bucket


def planned(
    table: KeyTable, key: Keys, values: Values, by_rows: dict[Key, list[torch.Tensor]] | None = None
) -> tuple[Plan, Any]:
    """Return the plan of a call and its values, one tensor or several per key, after checking them.

    Args:
        table: where keys lie.
        key: as the caller gave them.
        values: for them.
        by_rows: keys whose values are row-sparse are put here instead; None: such values are an error.

    Raises:
        ValueError: another shape than the key has, or rows for a key without a place for them.
        TypeError: sparse where it must be dense.
    """
    if isinstance(key, list) and isinstance(values, list) and all(map(_is_dense, values)):
        plan = table.known_plan(tuple(key))
        if plan is not None and [one.shape for one in values] == plan.shapes:
            return plan, values
    keys, devices = normalise(key, values)
    if by_rows is not None:
        by_rows |= _row_sparse(table, keys, devices)
        devices = [tensors for one, tensors in zip(keys, devices, strict=True) if one not in by_rows]
        keys = [one for one in keys if one not in by_rows]
    plan = table.plan(tuple(keys))
    for one, shape, tensors in zip(keys, plan.shapes, devices, strict=True):
        for tensor in tensors:
            if tensor.shape != shape:
                raise ValueError(f"key {one!r} was initialised with shape {tuple(shape)}, not {tuple(tensor.shape)}")
            if tensor.layout is not torch.strided:
                raise TypeError(f"the tensor for key {one!r} is sparse; use row_sparse_pull for some of its rows")
    if all(len(tensors) == 1 for tensors in devices):
        return plan, [tensors[0] for tensors in devices]
    return plan, devices


def _row_sparse(
    table: KeyTable, keys: Sequence[Key], values: Sequence[list[torch.Tensor]]
) -> dict[Key, list[torch.Tensor]]:
    """Return the keys all of whose values are row-sparse, after checking them."""
    found = {one: tensors for one, tensors in zip(keys, values, strict=True) if all(t.is_sparse for t in tensors)}
    for one, place in zip(found, table.locate(list(found)), strict=True):
        if place[0].spec.answers:
            raise ValueError(f"the rows of key {one!r} are the business of the optimizer that made it")
        value = place[0].value_of(place[1])
        check.pushes({one: value}, {one: found[one]})
        if not place[0].spec.rows or own_bucket(place) is None:
            raise ValueError(f"key {one!r} has no place of its own for rows: initialise it with a sparse value")
    return found


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
