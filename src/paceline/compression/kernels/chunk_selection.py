"""Loops of the ``chunktopk`` codec: the largest elements of each chunk, their two magnitudes, and streams of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.accumulate import ZERO, accumulate
from paceline.compression.kernels.jit import F32, F32_IN, I64, U8, U8_IN, U32, kernel
from paceline.compression.kernels.magnitude import OF_FLOAT, largest_magnitude, take_indices

#: bf16 is the upper half of a float32. The largest finite one:
_LARGEST_BF16 = np.uint32(0x7F7F)
_HALF_BF16 = np.uint32(0x8000)
_SHIFT = np.uint32(16)
_UP = np.int32(1)
_NOT = np.int32(0)


@kernel(types.int64(F32_IN, types.int32))
def count_above(chunk: Any, threshold: Any) -> Any:
    """Return how many magnitudes are above ``threshold``, a bit pattern."""
    bits = chunk.view(np.int32)
    count = np.int32(0)
    for i in range(len(bits)):
        count = np.int32(count + (_UP if (bits[i] & OF_FLOAT) > threshold else _NOT))
    return np.int64(count)


@kernel("UniTuple(int64, 2)(Array(float32, 1, 'C', readonly=True), int64)")
def kth_largest(chunk: Any, k: Any) -> Any:
    """Return a bit pattern and a number: the k largest magnitudes are those above it and so many equal to it.

    By bisection: a pass over a chunk in the cache is cheaper than any sorting, and about 16 of 31 passes suffice.
    """
    low = np.int64(-1)  # more than k are above it, or all
    high = np.int64(largest_magnitude(chunk))  # fewer than k are above it
    above_high = np.int64(0)
    while high - low > 1:
        middle = (low + high) // 2
        above = count_above(chunk, np.int32(middle))
        if above == k:
            return middle, np.int64(0)
        if above > k:
            low = middle
        else:
            high, above_high = middle, above
    return high, k - above_high


@kernel(types.void(F32, F32))
def round_to_bf16(values: Any, rounded: Any) -> None:
    """Round finite values that are not negative to bf16, away from infinity."""
    bits = values.view(np.uint32)
    out = rounded.view(np.uint32)
    for i in range(len(bits)):
        out[i] = min((bits[i] + _HALF_BF16) >> _SHIFT, _LARGEST_BF16) << _SHIFT


@kernel(types.float32(F32_IN, U32, F32))
def two_magnitudes(chunk: Any, indices: Any, found: Any) -> Any:
    """Write two magnitudes for elements, a low and a high one; returns the bound above which the high one is meant.

    The bound is midway between the least and the largest magnitude; each value is the mean on its side of it.
    """
    least, most = abs(chunk[indices[0]]), abs(chunk[indices[0]])
    for j in range(len(indices)):
        magnitude = abs(chunk[indices[j]])
        least = min(least, magnitude)
        most = max(most, magnitude)
    bound = np.float32(least / np.float32(2) + most / np.float32(2))
    sums = np.zeros(2, np.float64)
    counts = np.zeros(2, np.int64)
    for j in range(len(indices)):
        magnitude = abs(chunk[indices[j]])
        side = 1 if magnitude > bound else 0
        sums[side] += magnitude
        counts[side] += 1
    means = np.empty(2, np.float32)
    means[0] = np.float32(sums[0] / max(counts[0], 1))
    means[1] = np.float32(sums[1] / counts[1]) if counts[1] else means[0]
    if counts[0] == 0:
        means[0] = means[1]
    round_to_bf16(means, found)
    return bound


@kernel(types.void(U8, types.int64, types.int64, types.int64))
def write_bits(stream: Any, position: Any, width: Any, value: Any) -> None:
    """Write ``width`` bits at a position of a stream that is 0 there, the lowest bit first."""
    for b in range(width):
        at = position + b
        stream[at >> 3] |= np.uint8(((value >> b) & 1) << (at & 7))


@kernel(types.int64(U8_IN, types.int64, types.int64))
def read_bits(stream: Any, position: Any, width: Any) -> Any:
    """Return the number that :func:`write_bits` wrote."""
    value = np.int64(0)
    for b in range(width):
        at = position + b
        value |= np.int64((stream[at >> 3] >> (at & 7)) & 1) << b
    return value


@kernel(types.void(F32, types.int64, U32, types.int64, U8))
def encode_chunk(chunk: Any, shift: Any, indices: Any, steps: Any, out: Any) -> None:
    """Move the largest elements of a chunk, as many as ``indices``, out of it into a stream of bytes."""
    k = len(indices)
    threshold, ties = kth_largest(chunk, k)
    take_indices(chunk, threshold, ties, indices)
    levels = np.empty(2, np.float32)
    bound = two_magnitudes(chunk, indices, levels)
    out[:] = 0
    for side in range(2):
        write_bits(out, 16 * side, 16, np.int64(levels.view(np.uint32)[side] >> _SHIFT))
    fields = 32 + k + steps
    for j in range(k):
        index = np.int64(indices[j])
        value = chunk[index]
        is_high, is_down = abs(value) > bound, value < ZERO
        level = levels[1] if is_high else levels[0]
        chunk[index] = value + level if is_down else value - level
        write_bits(out, 32 + (index >> shift) + j, 1, 1)
        code = (index & ((1 << shift) - 1)) << 2 | (2 if is_down else 0) | (1 if is_high else 0)
        write_bits(out, fields + j * (shift + 2), shift + 2, code)


@kernel(types.boolean(U8_IN, types.int64, types.int64, types.int64, U32, F32))
def decode_chunk(stream: Any, numel: Any, shift: Any, steps: Any, indices: Any, values: Any) -> Any:
    """Read the indices and the values of a chunk; returns False where no sender writes such a stream."""
    k = len(indices)
    levels = np.empty(2, np.float32)
    for side in range(2):
        levels.view(np.uint32)[side] = np.uint32(read_bits(stream, 16 * side, 16)) << _SHIFT
    if not (ZERO <= levels[0] <= levels[1] < np.inf):
        return False
    fields = 32 + k + steps
    j = 0
    last = np.int64(-1)
    for at in range(k + steps):
        if not read_bits(stream, 32 + at, 1):
            continue
        if j == k:
            return False
        code = read_bits(stream, fields + j * (shift + 2), shift + 2)
        index = (np.int64(at - j) << shift) | (code >> 2)
        if index <= last or index >= numel:
            return False
        last = index
        indices[j] = index
        level = levels[1] if code & 1 else levels[0]
        values[j] = -level if code & 2 else level
        j += 1
    end = fields + k * (shift + 2)
    return j == k and read_bits(stream, end, 8 * len(stream) - end) == 0


@kernel(types.int64(F32_IN, F32, types.int64, types.int64, types.float32, I64, U8))
def encode(grad: Any, residual: Any, chunk: Any, shift: Any, decay: Any, counts: Any, payload: Any) -> Any:
    """``residual = decay * residual + grad``, and move the largest elements of every chunk out of it.

    ``counts`` are the elements to send and the bytes, of a whole chunk and of the last one. Returns how many elements
    were dropped.
    """
    dropped, start, at = 0, 0, 0
    while start < len(residual):
        r = residual[start : start + chunk]
        which = 0 if len(r) == chunk else 2
        k, size = counts[which], counts[which + 1]
        if decay != np.float32(1):
            for i in range(len(r)):
                r[i] *= decay
        dropped += accumulate(grad[start : start + chunk], r)
        steps = ((len(r) - 1) >> shift) + 1
        encode_chunk(r, shift, np.empty(k, np.uint32), steps, payload[at : at + size])
        start += chunk
        at += size
    return dropped


@kernel(types.boolean(U8_IN, types.int64, types.int64, types.int64, types.float32, I64, F32))
def decode_add(payload: Any, numel: Any, chunk: Any, shift: Any, alpha: Any, counts: Any, out: Any) -> Any:
    """Add ``alpha`` times the elements of every chunk to ``out``, which is empty where they are only checked.

    Returns:
        Whether a sender may have written all of ``payload``; what comes after the first wrong chunk is not added.
    """
    start, at = 0, 0
    while start < numel:
        n = min(chunk, numel - start)
        which = 0 if n == chunk else 2
        k, size = counts[which], counts[which + 1]
        indices = np.empty(k, np.uint32)
        values = np.empty(k, np.float32)
        steps = ((n - 1) >> shift) + 1
        if not decode_chunk(payload[at : at + size], n, shift, steps, indices, values):
            return False
        if len(out):
            for j in range(k):
                out[start + indices[j]] += alpha * values[j]
        start += chunk
        at += size
    return True
