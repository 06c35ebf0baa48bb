"""Cutting N samples into parts: pure arithmetic that every worker repeats and that always agrees.

A part is described by its *slots*: positions in the epoch's order of the whole data set. As the order is the same on
all workers, disjoint slots are disjoint samples.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]


def check_part(num_parts: int, part_index: int) -> None:
    """Refuse a part that does not exist.

    Raises:
        ValueError: ``num_parts`` is below 1, or ``part_index`` is not one of 0 to ``num_parts - 1``.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; it must be at least 1")
    if not 0 <= part_index < num_parts:
        raise ValueError(f"part_index is {part_index}; with num_parts={num_parts} it is 0 to {num_parts - 1}")


def check_span(span: tuple[float, float]) -> None:
    """Refuse a fraction of the data that does not lie in 0 to 1 or is empty.

    Raises:
        ValueError: with what a span looks like.
    """
    begin, end = span
    if not 0.0 <= begin < end <= 1.0:
        raise ValueError(f"span ({begin}, {end}) is not a fraction of the data; 0 <= begin < end <= 1 is needed")


def part_bounds(length: int, num_parts: int, part_index: int) -> tuple[int, int]:
    """Return [start, stop) of one of ``num_parts`` contiguous parts; sizes differ by at most one (MXNet's MNISTIter).

    Raises:
        ValueError: there is no such part.
    """
    check_part(num_parts, part_index)
    return length * part_index // num_parts, length * (part_index + 1) // num_parts


def shard_bounds(length: int, num_parts: int, part_index: int) -> tuple[int, int]:
    """Return [start, stop) of one of ``num_parts`` contiguous parts; the first ones get what is left over, one each.

    So 10 samples over 4 parts make 3, 3, 2, 2: MXNet's ``gluon.data.Dataset.shard``.

    Raises:
        ValueError: there is no such part.
    """
    check_part(num_parts, part_index)
    size, extra = divmod(length, num_parts)
    start = part_index * size + min(part_index, extra)
    return start, start + size + (part_index < extra)


def span_bounds(length: int, span: tuple[float, float]) -> tuple[int, int]:
    """Return [start, stop) of a fraction; spans that share a boundary share its rounding, so none overlap.

    Raises:
        ValueError: the span does not lie in 0 to 1 or is empty.
    """
    check_span(span)
    return round(length * span[0]), round(length * span[1])


def window_slots(length: int, num_parts: int, part_index: int, *, drop_last: bool) -> Slots:
    """Return slots of equally large parts: a part one short borrows its neighbour's first sample (round the end).

    Together the parts cover every slot, and each repeats at most one; with ``drop_last`` nothing is repeated and
    ``length % num_parts`` slots are left out instead.
    """
    start, _ = part_bounds(length, num_parts, part_index)
    size = length // num_parts if drop_last else -(-length // num_parts)
    return np.arange(start, start + size, dtype=np.int64) % length


def column_slots(length: int, global_batch_size: int, columns: tuple[int, int], *, drop_last: bool) -> Slots:
    """Return the slots of the same columns of every global batch, batch after batch (LB-BSP's division of the work).

    The order is read in rows of ``global_batch_size``; the last row is filled from the beginning, or left out with
    ``drop_last``. Workers with other columns get the same number of rows, however unequal their columns.
    """
    rows = length // global_batch_size if drop_last else math.ceil(length / global_batch_size)
    first = np.arange(rows, dtype=np.int64)[:, None] * global_batch_size
    slots: Slots = (first + np.arange(*columns, dtype=np.int64)).reshape(-1) % length
    return slots
