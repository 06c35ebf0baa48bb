"""How kernels are compiled: one signature each, without the interpreter lock, cached on disk where that is possible.

All loops run on the calling thread: the process decides how many buckets it works on at once. Sender and receiver must
round alike, so ``fastmath`` is off but for sums at the sender whose order does not matter.

numba's cache looks at the file of a kernel only: remove ``__pycache__`` after a change of a kernel that kernels of
other files call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from numba import njit, types

logger = logging.getLogger(__name__)

#: Arrays are flat and contiguous; ``*_IN`` are only read (and accept writable arrays too).
F32 = types.Array(types.float32, 1, "C")
F32_IN = types.Array(types.float32, 1, "C", readonly=True)
MATRIX = types.Array(types.float32, 2, "C")
MATRIX_IN = types.Array(types.float32, 2, "C", readonly=True)
U8 = types.Array(types.uint8, 1, "C")
U8_IN = types.Array(types.uint8, 1, "C", readonly=True)
I8 = types.Array(types.int8, 1, "C")
I16_IN = types.Array(types.int16, 1, "C", readonly=True)
U32 = types.Array(types.uint32, 1, "C")
U32_IN = types.Array(types.uint32, 1, "C", readonly=True)
I64 = types.Array(types.int64, 1, "C")

#: numba has no locator for a read-only install without a home (RuntimeError), cannot write (OSError), or finds a
#: cache file that a full disk has cut (EOFError).
_CACHE_FAILURES = (RuntimeError, OSError, EOFError)

Kernel = Callable[..., Any]


def kernel(signature: Any, **options: Any) -> Callable[[Kernel], Kernel]:
    """Compile a function for one signature at import, with the on-disk cache or, where that fails, without it.

    Args:
        signature: a numba signature such as ``types.int64(F32_IN, F32)``, or its text.
        options: further options of ``numba.njit``.
    """

    def compiled(function: Kernel) -> Kernel:
        try:
            return njit([signature], cache=True, nogil=True, **options)(function)
        except _CACHE_FAILURES as error:
            logger.debug("compiling %s without a cache: %s", function.__name__, error)
            return njit([signature], nogil=True, **options)(function)

    return compiled
