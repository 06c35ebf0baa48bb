"""Shared memory between a worker and servers of the same host.

The worker makes memfds: files that live only in memory and vanish with their last holder, however it ended. A server
that the worker asks to maps them through ``/proc``; both must run as the same user in the same namespaces.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from dataclasses import dataclass

import torch

from paceline.errors import ProtocolError

# The names are missing from the os and fcntl modules of Python 3.11.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SHRINK = 2


class SharedTensor:
    """A flat tensor in a memfd.

    Args:
        numel: elements.
        dtype: element type.

    Raises:
        OSError: the memory is not to be had.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.fd = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = max(mmap.PAGESIZE, numel * dtype.itemsize)
            os.posix_fallocate(self.fd, 0, size)
            # Nobody can cut the file under the server's feet: reading beyond its end would kill the server.
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEAL_SHRINK)
            self.tensor = torch.frombuffer(mmap.mmap(self.fd, size), dtype=dtype, count=numel)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Give up the file; the memory goes when nobody maps it any more."""
        with contextlib.suppress(OSError):
            os.close(self.fd)


@dataclass(frozen=True)
class MappedArena:
    """A bucket's stretch of a worker's arena, as the server sees it."""

    values: torch.Tensor
    grads: torch.Tensor


def map_foreign(pid: int, fd: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Map the memfd of another process.

    Raises:
        ProtocolError: it cannot be opened, is no sealed memfd, or is too small.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith("/memfd:paceline"):
            raise ProtocolError(f"{path} is not shared memory of paceline")
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ProtocolError(f"shared memory {path} cannot be opened: {error.strerror}") from error
    try:
        if not fcntl.fcntl(own, _GET_SEALS) & _SEAL_SHRINK:
            raise ProtocolError(f"shared memory {path} can shrink")
        size = numel * dtype.itemsize
        if os.fstat(own).st_size < size:
            raise ProtocolError(f"shared memory {path} has {os.fstat(own).st_size} bytes, not {size}")
        return torch.frombuffer(mmap.mmap(own, max(mmap.PAGESIZE, size)), dtype=dtype, count=numel)
    finally:
        os.close(own)
