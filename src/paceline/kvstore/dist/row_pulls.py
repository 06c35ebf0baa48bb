"""Pulls into row-sparse targets, and of some rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline import arguments as check
from paceline.keys import Key, Keys, Values, normalise
from paceline.updaters.rows import put_rows, to_rows
from paceline.worker.key_table import KeyTable
from paceline.worker.rows import RowTraffic, own_bucket
from paceline.worker.traffic import Traffic


def pull_as_rows(table: KeyTable, traffic: Traffic, key: Key, targets: Sequence[torch.Tensor]) -> None:
    """Pull the whole value of a key into row-sparse targets: all rows that are not 0."""
    [(block, index)] = table.locate([key])
    whole = torch.empty_like(block.value_of(index))
    traffic.pull(table.plan((key,)), [whole])
    with torch.no_grad():
        for target in targets:
            target.copy_(to_rows(whole).to(target.device, target.dtype))


def pull_some_rows(table: KeyTable, rows: RowTraffic, key: Keys, out: Values, row_ids: Values) -> None:
    """Pull rows of keys that were initialised with sparse values, after this worker's own pushes.

    Args:
        table: the store's keys.
        rows: the store's row-sparse pushes and pulls.
        key: keys that were initialised with sparse values.
        out: as in ``DistStore.row_sparse_pull``.
        row_ids: row numbers, one tensor per key or per target.

    Raises:
        ValueError: numbers outside of the value, another shape, or a key that is not row-sparse.
    """
    outs, ids = (dict(zip(*normalise(key, one), strict=True)) for one in (out, row_ids))
    places = dict(zip(outs, table.locate(list(outs)), strict=True))
    values = {one: block.value_of(index) for one, (block, index) in places.items()}
    check.outputs(values, outs)
    chosen = {one: check.row_ids(one, values[one], ids[one], len(targets)) for one, targets in outs.items()}
    for one, place in places.items():
        if own_bucket(place) is None:
            raise ValueError(f"key {one!r} has no bucket of its own for rows: initialise it with a sparse value")
    for one, targets in outs.items():
        for target, wanted in zip(targets, chosen[one], strict=True):
            put_rows(rows.pull(places[one], wanted), wanted, target)
