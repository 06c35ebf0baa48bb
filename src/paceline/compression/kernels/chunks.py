"""Loops of the ``int8`` codec: one chunk at a time, so that its three loops find it in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.accumulate import LARGEST, ZERO, accumulate
from paceline.compression.kernels.jit import F32, F32_IN, I8, I8_IN, kernel
from paceline.compression.kernels.magnitude import largest_magnitude

_LEVELS = np.float32(127)
#: 127 times a larger scale may be infinite.
_LARGEST = np.nextafter(LARGEST / _LEVELS, ZERO)
#: The least scale whose reciprocal is finite. A chunk below it stays in the residual.
_SMALLEST = np.float32(1) / LARGEST * np.float32(2)
#: Adding and subtracting 1.5 * 2**23 rounds to the nearest integer, ties to even, and vectorises.
_ROUND = np.float32(12582912)


@kernel(types.int64(F32_IN, F32, types.int64, F32, I8))
def encode(grad: Any, residual: Any, chunk: Any, scales: Any, levels: Any) -> Any:
    """Add ``grad`` to ``residual`` and take the levels of every chunk out; returns how many elements were dropped."""
    patterns = scales.view(np.int32)
    dropped = 0
    for c in range(len(scales)):
        start = c * chunk
        r = residual[start : start + chunk]
        q = levels[start : start + chunk]
        dropped += accumulate(grad[start : start + chunk], r)
        patterns[c] = largest_magnitude(r)
        scale = min(scales[c] / _LEVELS, _LARGEST)
        if scale < _SMALLEST:
            scales[c] = ZERO
            q[:] = 0
            continue
        scales[c] = scale
        inverse = np.float32(1) / scale
        for i in range(len(r)):
            level = (r[i] * inverse + _ROUND) - _ROUND
            r[i] -= level * scale
            q[i] = np.int8(np.int32(level))  # by way of int32: no vector instruction goes from float32 to int8
    return dropped


@kernel(types.void(F32_IN, I8_IN, types.int64, F32))
def decode(scales: Any, levels: Any, chunk: Any, out: Any) -> None:
    """Overwrite ``out`` with level times scale."""
    for c in range(len(scales)):
        scale = scales[c]
        q = levels[c * chunk : (c + 1) * chunk]
        part = out[c * chunk : (c + 1) * chunk]
        for i in range(len(part)):
            part[i] = np.float32(q[i]) * scale


@kernel(types.void(F32_IN, I8_IN, types.int64, types.float32, F32))
def decode_add(scales: Any, levels: Any, chunk: Any, alpha: Any, out: Any) -> None:
    """Add ``alpha`` times level times scale to ``out``."""
    for c in range(len(scales)):
        scale = scales[c]
        q = levels[c * chunk : (c + 1) * chunk]
        part = out[c * chunk : (c + 1) * chunk]
        for i in range(len(part)):
            part[i] += alpha * (np.float32(q[i]) * scale)
