"""Magnitudes as bit patterns: unlike floats, patterns compare in vector registers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.jit import F32_IN, I16_IN, U32, kernel

#: All bits but the sign.
OF_FLOAT = np.int32(0x7FFFFFFF)
_OF_HALF = np.int16(0x7FFF)


@kernel(types.int32(F32_IN))
def largest_magnitude(chunk: Any) -> Any:
    """Return the bit pattern of the largest absolute value of float32."""
    bits = chunk.view(np.int32)
    top = np.int32(0)
    for i in range(len(bits)):
        top = max(top, np.int32(bits[i] & OF_FLOAT))
    return top


@kernel(types.int64(I16_IN))
def largest_pattern(halves: Any) -> Any:
    """Return the largest bit pattern of fp16 or bf16 without its sign: one not below infinity's is inf or NaN."""
    top = np.int16(0)
    for i in range(len(halves)):
        top = max(top, np.int16(halves[i] & _OF_HALF))
    return np.int64(top)


@kernel(types.void(F32_IN, types.int64, types.int64, U32))
def take_indices(chunk: Any, threshold: Any, ties: Any, indices: Any) -> None:
    """Write the indices of the elements above ``threshold`` (a bit pattern) and of the first ``ties`` equal to it."""
    bits = chunk.view(np.int32)
    j = 0
    for i in range(len(bits)):
        magnitude = bits[i] & OF_FLOAT
        if magnitude < threshold:
            continue
        if magnitude == threshold:
            if ties == 0:
                continue
            ties -= 1
        indices[j] = i
        j += 1
