"""Loops of the ``1bit`` codec: the scheme of the ``2bit`` kernels with eight elements per byte."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.accumulate import BLOCK, ZERO, suspicious
from paceline.compression.kernels.jit import F32, F32_IN, U8, kernel
from paceline.compression.kernels.packed_kernels import replace_non_finite

_ONE = np.float32(1)
_SET = np.uint8(1)
_CLEAR = np.uint8(0)
#: Moves the bits in bytes 0 to 7 of a little-endian word to bits 63 down to 56.
_GATHER = np.uint64(0x8040201008040201)
_TOP_BYTE = np.uint64(56)


@kernel(types.int64(F32_IN, F32, types.float32, U8))
def encode(grad: Any, residual: Any, threshold: Any, packed: Any) -> Any:
    """Add ``grad`` to ``residual``, take the signs out of it and pack them; returns how many elements were dropped."""
    bits = np.zeros(BLOCK, np.uint8)
    words = bits.view(np.uint64)
    # A dropped element is sent as 0 is, and the residual makes up for the value that this decodes to.
    left, code = (-_ONE, _SET) if threshold < ZERO else (_ONE, _CLEAR)
    dropped = 0
    for start in range(0, len(grad), BLOCK):
        g = grad[start : start + BLOCK]
        r = residual[start : start + BLOCK]
        n = len(g)
        for i in range(n):
            x = g[i] + r[i]
            up = x > threshold
            r[i] = x - (_ONE if up else -_ONE)
            bits[i] = _SET if up else _CLEAR
        if suspicious(r):
            dropped += replace_non_finite(r, bits, left, code)
        bits[n : n + 7] = _CLEAR
        out = packed[start // 8 : (start + n + 7) // 8]
        for i in range(len(out)):
            out[i] = np.uint8((words[i] * _GATHER) >> _TOP_BYTE)
    return dropped
