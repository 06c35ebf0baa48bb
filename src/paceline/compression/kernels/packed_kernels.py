"""Common parts of the kernels of codecs with several elements per byte: decoding by a table, non-finite elements."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.accumulate import BLOCK, LARGEST
from paceline.compression.kernels.jit import F32, MATRIX_IN, U8, U8_IN, kernel


@kernel(types.int64(F32, U8, types.float32, types.uint8))
def replace_non_finite(residual: Any, codes: Any, left: Any, code: Any) -> Any:
    """Set non-finite elements of a block to ``left`` and their codes to ``code``; returns how many there were."""
    replaced = 0
    for i in range(len(residual)):
        if not abs(residual[i]) <= LARGEST:
            residual[i] = left
            codes[i] = code
            replaced += 1
    return replaced


@kernel(types.void(U8_IN, MATRIX_IN, F32))
def decode(packed: Any, table: Any, out: Any) -> None:
    """Overwrite ``out`` with the 4 or 8 values that ``table`` has for each byte."""
    width = table.shape[1]
    whole = len(out) // width
    # A loop for each width, with constant distances: one loop for both is several times slower.
    if width == 8:
        for i in range(whole):
            row = table[packed[i]]
            for j in range(8):
                out[8 * i + j] = row[j]
    else:
        for i in range(whole):
            row = table[packed[i]]
            a, b, c, d = row[0], row[1], row[2], row[3]
            out[4 * i] = a
            out[4 * i + 1] = b
            out[4 * i + 2] = c
            out[4 * i + 3] = d
    for i in range(width * whole, len(out)):
        out[i] = table[packed[i // width], i % width]


@kernel(types.void(U8_IN, MATRIX_IN, F32))
def decode_add(packed: Any, table: Any, out: Any) -> None:
    """Add the 4 or 8 values that ``table`` has for each byte to ``out``."""
    width = table.shape[1]
    values = np.empty(BLOCK, np.float32)
    for start in range(0, len(out), BLOCK):
        part = out[start : start + BLOCK]
        n = len(part)
        decode(packed[start // width : (start + n + width - 1) // width], table, values[:n])
        for i in range(n):
            part[i] += values[i]
