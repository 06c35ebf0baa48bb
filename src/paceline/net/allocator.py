"""Settings of the C library's allocator for frames of megabytes, which are allocated and freed all the time."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3

_KEEP_BYTES = 128 * 1024 * 1024
_STEP_BYTES = 64 * 1024 * 1024
_LARGE_BYTES = 32 * 1024 * 1024


def keep_freed_frames() -> None:
    """Keep up to 128 MiB of freed memory in the process; only blocks above 32 MiB go back to the kernel at once.

    Every large frame that arrives is allocated. By default glibc gives such blocks back to the kernel when they are
    freed, and each page of the next frame is a page fault: up to 25,000 in a step for 100 MB. Without glibc this does
    nothing.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        for parameter, value in (
            (_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _KEEP_BYTES), (_TOP_PAD, _STEP_BYTES)
        ):  # fmt: skip
            mallopt(parameter, value)


def give_back_freed_memory() -> None:
    """Give free memory back to the kernel. Called when less will be needed, such as after keys were initialised."""
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
