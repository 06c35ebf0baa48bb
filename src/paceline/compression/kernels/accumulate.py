"""Adding a gradient to a residual, and keeping non-finite numbers out of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.jit import F32, F32_IN, kernel

#: Elements per inner loop: small enough for all that a block needs to stay in the L1 cache.
BLOCK = 512
LARGEST = np.float32(np.finfo(np.float32).max)
ZERO = np.float32(0)


@kernel(types.boolean(F32_IN), fastmath={"reassoc"})
def suspicious(block: Any) -> Any:
    """Tell whether a block may hold a non-finite number: false alarms are possible, misses are not.

    A sum in any order costs a third of a comparison per element, because it needs no mask.
    """
    total = ZERO
    for i in range(len(block)):
        total += block[i]
    return not abs(total) <= LARGEST


@kernel(types.int64(F32_IN, F32))
def accumulate(grad: Any, residual: Any) -> Any:
    """``residual += grad``; non-finite sums become 0 and are counted."""
    dropped = 0
    for start in range(0, len(grad), BLOCK):
        g = grad[start : start + BLOCK]
        r = residual[start : start + BLOCK]
        for i in range(len(g)):
            r[i] += g[i]
        if suspicious(r):
            for i in range(len(r)):
                if not abs(r[i]) <= LARGEST:
                    r[i] = ZERO
                    dropped += 1
    return dropped
