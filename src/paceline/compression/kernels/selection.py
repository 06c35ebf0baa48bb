"""Loops of the codecs that send few elements: exact selection by radix, random selection by strata, scatter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.accumulate import BLOCK, ZERO, accumulate
from paceline.compression.kernels.jit import F32, F32_IN, I64, U32, U32_IN, kernel

#: Magnitudes are compared as the 31 low bits of their float32 pattern: 15 high and 16 low ones.
HIGH_BINS = 1 << 15
LOW_BINS = 1 << 16
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LOW = np.uint32(0xFFFF)
_HIGH_SHIFT = np.uint32(16)


@kernel(types.int64(F32_IN, F32, I64))
def accumulate_and_count(grad: Any, residual: Any, counts: Any) -> Any:
    """``residual += grad`` and count the magnitudes by their high bits; returns how many elements were dropped."""
    bits = residual.view(np.uint32)
    dropped = 0
    for start in range(0, len(grad), BLOCK):
        dropped += accumulate(grad[start : start + BLOCK], residual[start : start + BLOCK])
        for i in range(start, min(start + BLOCK, len(grad))):
            counts[(bits[i] & _MAGNITUDE) >> _HIGH_SHIFT] += 1
    return dropped


@kernel(types.void(F32, types.int64, I64))
def count_low(residual: Any, high: Any, counts: Any) -> None:
    """Count the magnitudes whose high bits are ``high`` by their low bits."""
    bits = residual.view(np.uint32)
    for i in range(len(bits)):
        magnitude = bits[i] & _MAGNITUDE
        if (magnitude >> _HIGH_SHIFT) == high:
            counts[magnitude & _LOW] += 1


@kernel("UniTuple(int64, 2)(int64[::1], int64)")
def last_bin(counts: Any, wanted: Any) -> Any:
    """Return the highest bin such that it and those above hold ``wanted`` elements, and how many of its own count."""
    above = len(counts)
    while wanted > 0:
        above -= 1
        wanted -= counts[above]
    return above, wanted + counts[above]


@kernel(types.boolean(U32_IN, types.int64))
def ascending_below(indices: Any, limit: Any) -> Any:
    """Tell whether all indices are below ``limit`` and each is larger than the one before."""
    last = np.int64(-1)
    for i in range(len(indices)):
        index = np.int64(indices[i])
        if index <= last:
            return False
        last = index
    return last < limit


@kernel(types.void(U32_IN, F32_IN, types.float32, F32))
def scatter_add(indices: Any, values: Any, alpha: Any, out: Any) -> None:
    """``out[indices] += alpha * values``."""
    for i in range(len(indices)):
        out[indices[i]] += alpha * values[i]


@kernel(types.uint64(types.uint64))
def mix(x: Any) -> Any:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection that scrambles all 64 bits."""
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel(types.void(types.uint64, types.uint64, types.int64, U32))
def draw(seed: Any, round_: Any, numel: Any, indices: Any) -> None:
    """Draw one index from each of ``len(indices)`` equal strata of ``range(numel)``: distinct and ascending."""
    k = len(indices)
    width = numel // k
    wider = numel % k
    stream = mix(mix(seed) ^ round_)
    for j in range(k):
        size = width + 1 if j < wider else width
        offset = np.int64(mix(stream ^ np.uint64(j)) % np.uint64(size))
        indices[j] = j * width + min(j, wider) + offset


@kernel(types.void(F32, U32_IN, F32))
def take(residual: Any, indices: Any, values: Any) -> None:
    """Move ``residual[indices]`` into ``values``."""
    for j in range(len(indices)):
        values[j] = residual[indices[j]]
        residual[indices[j]] = ZERO
