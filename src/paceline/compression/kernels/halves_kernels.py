"""The loop of the half-precision codecs that torch has not."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.jit import I16_IN, kernel

_MAGNITUDE = np.int16(0x7FFF)


@kernel(types.int64(I16_IN))
def largest_pattern(halves: Any) -> Any:
    """The largest bit pattern without its sign: in fp16 and bf16 a pattern not below infinity's is inf or NaN."""
    top = np.int16(0)
    for i in range(len(halves)):
        top = max(top, np.int16(halves[i] & _MAGNITUDE))
    return np.int64(top)
