"""Loops of the ``2bit`` codec.

A block goes through two loops that each vectorise: the first adds, compares and writes one code per byte, the second
packs four codes into one byte with a multiplication. Loops over four interleaved elements are 20 times slower.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.accumulate import BLOCK, ZERO, suspicious
from paceline.compression.kernels.jit import F32, F32_IN, U8, kernel
from paceline.compression.kernels.packed_kernels import replace_non_finite

_NONE = np.uint8(0b00)
_DOWN = np.uint8(0b10)
_UP = np.uint8(0b11)
#: Moves the codes in bytes 0, 1, 2, 3 of a little-endian word to bits 31-30, 29-28, 27-26, 25-24.
_GATHER = np.uint32(1 << 30 | 1 << 20 | 1 << 10 | 1)
_TOP_BYTE = np.uint32(24)


@kernel(types.int64(F32_IN, F32, types.float32, U8))
def encode(grad: Any, residual: Any, threshold: Any, packed: Any) -> Any:
    """Add ``grad`` to ``residual``, take the codes out of it and pack them; returns how many elements were dropped."""
    codes = np.zeros(BLOCK, np.uint8)
    words = codes.view(np.uint32)
    dropped = 0
    for start in range(0, len(grad), BLOCK):
        g = grad[start : start + BLOCK]
        r = residual[start : start + BLOCK]
        n = len(g)
        for i in range(n):
            x = g[i] + r[i]
            up = x >= threshold
            down = x <= -threshold
            r[i] = x - ((threshold if up else ZERO) - (threshold if down else ZERO))
            codes[i] = (_UP if up else _NONE) | (_DOWN if down else _NONE)
        if suspicious(r):
            dropped += replace_non_finite(r, codes, ZERO, _NONE)
        codes[n : n + 3] = _NONE
        out = packed[start // 4 : (start + n + 3) // 4]
        for i in range(len(out)):
            out[i] = np.uint8((words[i] * _GATHER) >> _TOP_BYTE)
    return dropped
