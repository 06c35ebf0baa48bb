"""Loops of the codecs ``int8`` and ``int4``: one chunk at a time, so that its loops find it in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.accumulate import LARGEST, ZERO, accumulate
from paceline.compression.kernels.jit import F32, F32_IN, I8, U8, U8_IN, kernel
from paceline.compression.kernels.magnitude import largest_magnitude

_LEVELS_8 = np.float32(127)
_LEVELS_4 = np.float32(7)
#: The least scale whose reciprocal is finite. A chunk below it stays in the residual.
_SMALLEST = np.float32(1) / LARGEST * np.float32(2)
#: Adding and subtracting 1.5 * 2**23 rounds to the nearest integer, ties to even, and vectorises.
_ROUND = np.float32(12582912)
#: Half bytes: level 0 is sent as 8.
_NO_LEVEL = np.uint8(8)
_HALF = np.uint8(4)
_LOWER = np.uint8(15)


@kernel(types.float32(F32, types.float32, I8))
def take_levels(residual: Any, levels: Any, out: Any) -> Any:
    """Take the levels ``-levels`` ... ``levels`` of a chunk out of its residual; returns the chunk's scale."""
    scales = np.empty(1, np.float32)
    scales.view(np.int32)[0] = largest_magnitude(residual)
    # The largest level times a larger scale may be infinite.
    scale = min(scales[0] / levels, np.nextafter(LARGEST / levels, ZERO))
    if scale < _SMALLEST:
        out[:] = 0
        return ZERO
    inverse = np.float32(1) / scale
    for i in range(len(residual)):
        level = (residual[i] * inverse + _ROUND) - _ROUND
        residual[i] -= level * scale
        out[i] = np.int8(np.int32(level))  # by way of int32: no vector instruction goes from float32 to int8
    return scale


@kernel(types.int64(F32_IN, F32, types.int64, F32, U8))
def encode_bytes(grad: Any, residual: Any, chunk: Any, scales: Any, packed: Any) -> Any:
    """Add ``grad`` to ``residual`` and take the levels of every chunk out; returns how many elements were dropped."""
    levels = packed.view(np.int8)
    dropped = 0
    for c in range(len(scales)):
        start = c * chunk
        r = residual[start : start + chunk]
        dropped += accumulate(grad[start : start + chunk], r)
        scales[c] = take_levels(r, _LEVELS_8, levels[start : start + chunk])
    return dropped


@kernel(types.void(F32_IN, U8_IN, types.int64, F32))
def decode_bytes(scales: Any, packed: Any, chunk: Any, out: Any) -> None:
    """Overwrite ``out`` with level times scale."""
    levels = packed.view(np.int8)
    for c in range(len(scales)):
        scale = scales[c]
        q = levels[c * chunk : (c + 1) * chunk]
        part = out[c * chunk : (c + 1) * chunk]
        for i in range(len(part)):
            part[i] = np.float32(q[i]) * scale


@kernel(types.void(F32_IN, U8_IN, types.int64, types.float32, F32))
def decode_add_bytes(scales: Any, packed: Any, chunk: Any, alpha: Any, out: Any) -> None:
    """Add ``alpha`` times level times scale to ``out``."""
    levels = packed.view(np.int8)
    for c in range(len(scales)):
        scale = scales[c]
        q = levels[c * chunk : (c + 1) * chunk]
        part = out[c * chunk : (c + 1) * chunk]
        for i in range(len(part)):
            part[i] += alpha * (np.float32(q[i]) * scale)


@kernel(types.int64(F32_IN, F32, types.int64, F32, U8))
def encode_halves(grad: Any, residual: Any, chunk: Any, scales: Any, packed: Any) -> Any:
    """As :func:`encode_bytes`, with two levels to a byte."""
    levels = np.empty(chunk, np.int8)
    dropped = 0
    for c in range(len(scales)):
        start = c * chunk
        r = residual[start : start + chunk]
        dropped += accumulate(grad[start : start + chunk], r)
        n = len(r)
        scales[c] = take_levels(r, _LEVELS_4, levels[:n])
        half = (n + 1) // 2
        upper = levels[:half].view(np.uint8)
        lower = levels[half:n].view(np.uint8)
        out = packed[start // 2 : start // 2 + half]
        for i in range(len(lower)):
            out[i] = np.uint8((upper[i] + _NO_LEVEL) << _HALF) | np.uint8(lower[i] + _NO_LEVEL)
        if n % 2:
            out[half - 1] = np.uint8((upper[half - 1] + _NO_LEVEL) << _HALF)
    return dropped


@kernel(types.void(F32_IN, U8_IN, types.int64, F32))
def decode_halves(scales: Any, packed: Any, chunk: Any, out: Any) -> None:
    """As :func:`decode_bytes`, with two levels to a byte."""
    for c in range(len(scales)):
        scale = scales[c]
        part = out[c * chunk : (c + 1) * chunk]
        half = (len(part) + 1) // 2
        q = packed[c * chunk // 2 : c * chunk // 2 + half]
        upper = part[:half]
        lower = part[half:]
        for i in range(len(upper)):
            upper[i] = np.float32(np.int32(q[i] >> _HALF) - np.int32(8)) * scale
        for i in range(len(lower)):
            lower[i] = np.float32(np.int32(q[i] & _LOWER) - np.int32(8)) * scale


@kernel(types.void(F32_IN, U8_IN, types.int64, types.float32, F32))
def decode_add_halves(scales: Any, packed: Any, chunk: Any, alpha: Any, out: Any) -> None:
    """As :func:`decode_add_bytes`, with two levels to a byte."""
    for c in range(len(scales)):
        scale = scales[c]
        part = out[c * chunk : (c + 1) * chunk]
        half = (len(part) + 1) // 2
        q = packed[c * chunk // 2 : c * chunk // 2 + half]
        upper = part[:half]
        lower = part[half:]
        for i in range(len(upper)):
            upper[i] += alpha * (np.float32(np.int32(q[i] >> _HALF) - np.int32(8)) * scale)
        for i in range(len(lower)):
            lower[i] += alpha * (np.float32(np.int32(q[i] & _LOWER) - np.int32(8)) * scale)


#: By the largest level.
ENCODE = {127: encode_bytes, 7: encode_halves}
DECODE = {127: decode_bytes, 7: decode_halves}
DECODE_ADD = {127: decode_add_bytes, 7: decode_add_halves}
