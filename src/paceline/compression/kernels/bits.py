"""Loops of the codecs with one or two bits per element: several elements share a byte.

Encoding takes a block through two loops that each vectorise: the first adds, compares and writes one code per byte,
the second packs the codes of 4 or 8 bytes into one with a multiplication. Loops over four interleaved elements are 20
times slower. Decoding is a look-up in a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.accumulate import BLOCK, LARGEST, ZERO, suspicious
from paceline.compression.kernels.jit import F32, F32_IN, MATRIX_IN, U8, U8_IN, kernel

_ONE = np.float32(1)
#: Codes of one bit.
_SET = np.uint8(1)
_CLEAR = np.uint8(0)
#: Moves the bits in bytes 0 to 7 of a little-endian word to bits 63 down to 56.
_GATHER_ONE = np.uint64(0x8040201008040201)
_TOP_BYTE_ONE = np.uint64(56)
#: Codes of two bits.
_NONE = np.uint8(0b00)
_DOWN = np.uint8(0b10)
_UP = np.uint8(0b11)
#: Moves the codes in bytes 0, 1, 2, 3 of a little-endian word to bits 31-30, 29-28, 27-26, 25-24.
_GATHER_TWO = np.uint32(1 << 30 | 1 << 20 | 1 << 10 | 1)
_TOP_BYTE_TWO = np.uint32(24)


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


@kernel(types.int64(F32_IN, F32, types.float32, U8))
def encode_one(grad: Any, residual: Any, threshold: Any, packed: Any) -> Any:
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
            out[i] = np.uint8((words[i] * _GATHER_ONE) >> _TOP_BYTE_ONE)
    return dropped


@kernel(types.int64(F32_IN, F32, types.float32, U8))
def encode_two(grad: Any, residual: Any, threshold: Any, packed: Any) -> Any:
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
            out[i] = np.uint8((words[i] * _GATHER_TWO) >> _TOP_BYTE_TWO)
    return dropped


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
