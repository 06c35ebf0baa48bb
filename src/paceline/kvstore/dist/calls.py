"""Calls of a store's verbs: their arguments are checked, their plans are found, and row-sparse targets are pulled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from paceline.layout import arguments as check
from paceline.layout.keys import Key, Keys, Values, by_key
from paceline.updaters.rows import put_rows, to_rows
from paceline.worker.call_plan import CallPlan
from paceline.worker.key_table import KeyTable
from paceline.worker.rows import RowTraffic, own_bucket
from paceline.worker.traffic import Traffic

#: A plan and its values: one tensor, or several, per key.
Planned: TypeAlias = tuple[CallPlan, Any]
#: Tensors that are pushed or pulled as rows, by key.
ByRows: TypeAlias = dict[Key, list[torch.Tensor]]

_PLAIN, _DENSE = {torch.Tensor, torch.nn.Parameter}, {torch.strided}


def plan_push(table: KeyTable, key: Keys, values: Values) -> tuple[Planned, ByRows]:
    """Check a push; return its plan with its values, and the values that are pushed as rows.

    Rows become dense if their key was not initialised with rows, or if other values of the key are dense. Real values
    of another dtype than their key's, as of a model that is ``double()`` by now, are converted.

    Raises:
        ValueError: a value does not have its key's shape, is complex, or is sparse in more than its rows.
    """
    known = _known(table, key, values)
    if known is not None and not any(dtype.is_complex for dtype in {one.dtype for one in known[1]}):
        return known, {}
    pushed = by_key(key, values)
    for one, tensors in pushed.items():
        if any(map(torch.is_complex, tensors)):
            raise ValueError(f"the value of key {one!r} is complex, but the key is not; give torch.view_as_real of it")
    by_rows = _by_rows(table, pushed)
    dense = {one: [_dense(tensor) for tensor in tensors] for one, tensors in pushed.items() if one not in by_rows}
    return _planned(table, dense, "given"), by_rows


def plan_pull(table: KeyTable, key: Keys, outs: Values) -> tuple[Planned, ByRows]:
    """Check a pull; return its plan with its dense targets, and the row-sparse targets.

    Raises:
        ValueError: a target does not have its key's shape.
    """
    known = _known(table, key, outs)
    if known is not None:
        return known, {}
    targets = by_key(key, outs)
    rows = {one: sparse for one, tensors in targets.items() if (sparse := [t for t in tensors if t.is_sparse])}
    for (one, sparse), (block, index) in zip(rows.items(), table.locate(list(rows)), strict=True):
        for tensor in sparse:
            check.same_shape(one, tensor, block.value_of(index).shape, "out")
    dense = {one: kept for one, tensors in targets.items() if (kept := [t for t in tensors if not t.is_sparse])}
    return _planned(table, dense, "out"), rows


def _known(table: KeyTable, key: Keys, values: Values) -> Planned | None:
    """Return the plan of a call that was made before, without checking every key."""
    if isinstance(key, list) and isinstance(values, list) and _all_dense(values):
        plan = table.known_plan(tuple(key))
        if plan is not None and [one.shape for one in values] == plan.shapes:
            return plan, values
    return None


def _planned(table: KeyTable, values: Mapping[Key, Sequence[torch.Tensor]], what: str) -> Planned:
    plan = table.plan(tuple(values))
    for (one, tensors), shape in zip(values.items(), plan.shapes, strict=True):
        for tensor in tensors:
            check.same_shape(one, tensor, shape, what)
            if tensor.layout is not torch.strided:
                raise TypeError(f"the tensor for key {one!r} is {tensor.layout}; a store takes dense tensors and rows")
    if all(len(tensors) == 1 for tensors in values.values()):
        return plan, [tensors[0] for tensors in values.values()]
    return plan, list(values.values())


def _by_rows(table: KeyTable, values: Mapping[Key, list[torch.Tensor]]) -> ByRows:
    """Check and return the keys that were initialised with rows and whose values are all rows."""
    sparse = {one: tensors for one, tensors in values.items() if any(tensor.is_sparse for tensor in tensors)}
    found: ByRows = {}
    for (one, tensors), place in zip(sparse.items(), table.locate(list(sparse)), strict=True):
        if place[0].spec.answers:
            raise ValueError(f"only the optimizer that initialised key {one!r} may push or pull its rows")
        check.pushes({one: place[0].value_of(place[1])}, {one: tensors})
        if place[0].spec.rows and own_bucket(place) is not None and all(tensor.is_sparse for tensor in tensors):
            found[one] = tensors
    return found


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense() if tensor.is_sparse else tensor


def _all_dense(values: list[Any]) -> bool:
    """Return whether all are plain dense tensors. Sets, as a Python call per key would take most of a call's time."""
    return _PLAIN.issuperset(map(type, values)) and {one.layout for one in values} == _DENSE


# ---- row-sparse targets -----------------------------------------------------------------------------------------------


def pull_as_rows(table: KeyTable, traffic: Traffic, key: Key, targets: Sequence[torch.Tensor]) -> None:
    """Pull the whole value of a key into row-sparse targets: all rows that are not 0."""
    [(block, index)] = table.locate([key])
    whole = torch.empty_like(block.value_of(index))
    traffic.pull(table.plan((key,)), [whole])
    with torch.no_grad():
        for target in targets:
            target.copy_(to_rows(whole).to(target.device, target.dtype))


def pull_some_rows(table: KeyTable, rows: RowTraffic, key: Keys, out: Values, row_ids: Values | None) -> None:
    """Pull rows of keys that were initialised with sparse values, after this worker's own pushes.

    Raises:
        ValueError: numbers outside of the value, another shape, or a key that is not row-sparse.
    """
    outs = by_key(key, out)
    places = dict(zip(outs, table.locate(list(outs)), strict=True))
    values = {one: block.value_of(index) for one, (block, index) in places.items()}
    chosen = check.chosen_rows(values, outs, key, row_ids)
    for one, place in places.items():
        if own_bucket(place) is None:
            raise ValueError(f"key {one!r} has no bucket of its own for rows: initialise it with a sparse value")
    for one, targets in outs.items():
        for target, wanted in zip(targets, chosen[one], strict=True):
            put_rows(rows.pull(places[one], wanted), wanted, target)
