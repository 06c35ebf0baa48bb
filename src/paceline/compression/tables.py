"""Lookup tables with which the kernels decode a byte at a time."""

from __future__ import annotations

import functools

import numpy as np

from paceline.compression.buffers import Floats


@functools.lru_cache(maxsize=64)
def byte_table(values: tuple[float, ...], bits: int) -> Floats:
    """Return the values that each byte stands for.

    Args:
        values: the value of each code of ``bits`` bits.
        bits: 1, 2 or 4; the first element of a byte is in its most significant bits.

    Returns:
        Read-only float32 of shape (256, 8 // bits).
    """
    shifts = np.arange(8 - bits, -1, -bits)
    codes = (np.arange(256)[:, None] >> shifts) & ((1 << bits) - 1)
    table: Floats = np.array(values, np.float32)[codes]
    table.setflags(write=False)
    return table
