"""Shared memory between workers and servers of the same host.

Both sides make memfds: files that live only in memory and vanish with their last holder, however it ended. The other
side maps them through ``/proc``; both must run as the same user in the same namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass

import torch

from paceline.errors import ProtocolError

# The names are missing from the os, fcntl and mmap modules of Python 3.11.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SHRINK = 2
_MAP_FIXED = 0x10


#: Device and inode of the memfds that this process has made.
_made: set[tuple[int, int]] = set()


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
            size = max(mmap.PAGESIZE, _to_pages(numel * dtype.itemsize))
            os.posix_fallocate(self.fd, 0, size)
            # Nobody can cut the file under the other side's feet: reading beyond its end would kill it.
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEAL_SHRINK)
            self.tensor = torch.frombuffer(mmap.mmap(self.fd, size), dtype=dtype)[:numel]
            _made.add(_identity(self.fd))
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Give up the file; the memory goes when nobody maps it any more."""
        with contextlib.suppress(OSError):
            _made.discard(_identity(self.fd))
            os.close(self.fd)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


@dataclass(frozen=True)
class MappedArena:
    """A bucket's stretch of a worker's arena, as the server sees it."""

    values: torch.Tensor | None
    """None: the worker reads the server's own values."""
    grads: torch.Tensor


def pages(numel: int, dtype: torch.dtype) -> int:
    """Return how many elements the whole pages have that hold ``numel`` of them."""
    return _to_pages(numel * dtype.itemsize) // dtype.itemsize


def _to_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def map_foreign(pid: int, fd: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Map the memfd of another process.

    Raises:
        ProtocolError: it cannot be opened, is no sealed memfd, or is too small.
    """
    size = numel * dtype.itemsize
    own = open_foreign(pid, fd, size)
    try:
        return torch.frombuffer(mmap.mmap(own, max(mmap.PAGESIZE, size)), dtype=dtype, count=numel)
    finally:
        os.close(own)


def open_foreign(pid: int, fd: int, size: int) -> int:
    """Open the memfd of another process that has at least ``size`` bytes; returns a descriptor, to be closed.

    Raises:
        ProtocolError: it cannot be opened, is no sealed memfd, is too small, or the other process has it from this one.
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
        if pid != os.getpid() and _identity(own) in _made:
            raise ProtocolError(f"shared memory {path} was made by this process")
        if os.fstat(own).st_size < size:
            raise ProtocolError(f"shared memory {path} has {os.fstat(own).st_size} bytes, not {size}")
    except BaseException:
        os.close(own)
        raise
    return own


class Patchwork:
    """A flat tensor in private memory, parts of which can be put over with pages of shared files.

    A server keeps the values of its buckets in a file; where several servers own one arena, a worker sees all of them
    as one tensor.

    Args:
        numel: elements.
        dtype: element type.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._map = mmap.mmap(-1, max(mmap.PAGESIZE, _to_pages(numel * dtype.itemsize)), flags=_PRIVATE)
        self.tensor = torch.frombuffer(self._map, dtype=dtype)[:numel]
        self._patches: list[tuple[int, int]] = []

    def can_patch(self, start: int) -> bool:
        """Tell whether an element is the first of a page."""
        return start * self.tensor.itemsize % mmap.PAGESIZE == 0

    def patch(self, start: int, length: int, fd: int, file_start: int) -> None:
        """Show elements of a file at ``start``; what was there is gone, up to the end of the last page.

        Args:
            start: first element; must be the first of a page.
            length: elements.
            fd: the file; may be closed afterwards.
            file_start: first element inside the file; must be the first of a page.

        Raises:
            OSError: it cannot be mapped.
        """
        place, size = start * self.tensor.itemsize, _to_pages(length * self.tensor.itemsize)
        self._put(place, size, mmap.MAP_SHARED, fd, file_start * self.tensor.itemsize)
        self._patches.append((place, size))

    def detach(self) -> None:
        """Go on with private copies of what the files show now."""
        while self._patches:
            place, size = self._patches.pop()
            content = bytes(memoryview(self._map)[place : place + size])
            self._put(place, size, _PRIVATE, -1, 0)
            ctypes.memmove(self._address + place, content, size)

    @property
    def _address(self) -> int:
        return self.tensor.data_ptr()

    def _put(self, place: int, size: int, flags: int, fd: int, offset: int) -> None:
        """Replace pages of the private memory. Nothing else lies there: they belong to our own mapping."""
        assert 0 <= place <= place + size <= len(self._map)
        wanted = self._address + place
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        found = _libc.mmap(wanted, size, protection, flags | _MAP_FIXED, fd, offset)
        if found != wanted:
            raise OSError(ctypes.get_errno(), f"{size} bytes of shared memory cannot be mapped")


_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
