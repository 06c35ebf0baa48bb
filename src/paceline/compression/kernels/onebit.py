"""Loops of the ``1bit`` codec: the scheme of the ``2bit`` kernels with eight elements per byte."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.accumulate import BLOCK, LARGEST, ZERO, suspicious
from paceline.compression.kernels.jit import F32, F32_IN, MATRIX_IN, U8, U8_IN, kernel

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
    dropped_up = threshold < ZERO
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
            for i in range(n):
                if not abs(r[i]) <= LARGEST:
                    r[i] = -_ONE if dropped_up else _ONE
                    bits[i] = _SET if dropped_up else _CLEAR
                    dropped += 1
        bits[n : n + 7] = _CLEAR
        out = packed[start // 8 : (start + n + 7) // 8]
        for i in range(len(out)):
            out[i] = np.uint8((words[i] * _GATHER) >> _TOP_BYTE)
    return dropped


@kernel(types.void(U8_IN, MATRIX_IN, F32))
def decode(packed: Any, table: Any, out: Any) -> None:
    """Overwrite ``out`` with the eight values that ``table`` has for each byte."""
    whole = len(out) // 8
    for i in range(whole):
        row = table[packed[i]]
        for j in range(8):
            out[8 * i + j] = row[j]
    for i in range(8 * whole, len(out)):
        out[i] = table[packed[i // 8], i % 8]


@kernel(types.void(U8_IN, MATRIX_IN, F32))
def decode_add(packed: Any, table: Any, out: Any) -> None:
    """Add the eight values that ``table`` has for each byte to ``out``."""
    values = np.empty(BLOCK, np.float32)
    for start in range(0, len(out), BLOCK):
        part = out[start : start + BLOCK]
        n = len(part)
        decode(packed[start // 8 : (start + n + 7) // 8], table, values[:n])
        for i in range(n):
            part[i] += values[i]
