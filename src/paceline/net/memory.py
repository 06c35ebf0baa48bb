"""Memory that workers and servers of one host share, and memory that CUDA devices read directly.

Both sides make memfds: files in memory, which the kernel frees when the last process that holds them exits or is
killed. The other side opens them through ``/proc``, so both must run as the same user in the same namespaces.

A memfd is sealed against shrinking before another process may map it: a read beyond the end of a mapped file kills the
reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import ProtocolError

# Names that the os, fcntl and mmap modules of Python 3.11 do not have.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SHRINK = 2
_CLOEXEC, _ALLOW_SEALING = 1, 2
_MAP_FIXED = 0x10


#: Device and inode of the memfds that this process has made.
_made: set[tuple[int, int]] = set()


def _reserve(fd: int, size: int) -> None:
    """Make a file as long, and have the memory for it."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)


class SharedTensor:
    """A flat tensor in a memfd.

    Raises:
        OSError: allocation failed.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory that processes share by descriptors, as Linux has")
        self.fd = os.memfd_create("paceline", _CLOEXEC | _ALLOW_SEALING)
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, self.fd)
            size = max(mmap.PAGESIZE, _to_pages(numel * dtype.itemsize))
            _reserve(self.fd, size)
            # Reading beyond the end of a file that shrank would kill the other side.
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEAL_SHRINK)
            self.tensor = torch.frombuffer(mmap.mmap(self.fd, size), dtype=dtype)[:numel]
            _made.add(_identity(self.fd))
            on_error.pop_all()
        self._close = weakref.finalize(self, _close_made, self.fd)

    def close(self) -> None:
        """Close the file, as its end of life does. The kernel frees the memory when no process maps it any more."""
        self._close()


def _close_made(fd: int) -> None:
    with contextlib.suppress(OSError):
        _made.discard(_identity(fd))
        os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


@dataclass(frozen=True)
class MappedArena:
    """A bucket's range of a worker's arena, mapped by the server."""

    values: torch.Tensor | None
    """None: the worker reads the server's own values."""
    grads: torch.Tensor


def pages(numel: int, dtype: torch.dtype) -> int:
    """Return the number of elements of the whole pages that hold ``numel`` elements."""
    return _to_pages(numel * dtype.itemsize) // dtype.itemsize


def _to_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def map_foreign(pid: int, fd: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Map the memfd of another process.

    Raises:
        ProtocolError: it cannot be opened, is no sealed memfd, is too small, or this process made it.
    """
    size = numel * dtype.itemsize
    own = open_foreign(pid, fd, size)
    try:
        return torch.frombuffer(mmap.mmap(own, max(mmap.PAGESIZE, size)), dtype=dtype, count=numel)
    finally:
        os.close(own)


def open_foreign(pid: int, fd: int, size: int) -> int:
    """Open the memfd of another process, at least ``size`` bytes long. The caller closes the descriptor.

    Raises:
        ProtocolError: it cannot be opened, is no sealed memfd, is too small, or this process made it.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith("/memfd:paceline"):
            raise ProtocolError(f"{path} is not shared memory of paceline")
        own: int = os.open(path, os.O_RDWR)
    except OSError as error:
        raise ProtocolError(f"shared memory {path} cannot be opened: {error.strerror}") from error
    with contextlib.ExitStack() as on_error:
        on_error.callback(os.close, own)
        if not fcntl.fcntl(own, _GET_SEALS) & _SEAL_SHRINK:
            raise ProtocolError(f"shared memory {path} can shrink")
        if pid != os.getpid() and _identity(own) in _made:
            raise ProtocolError(f"shared memory {path} was made by this process")
        if os.fstat(own).st_size < size:
            raise ProtocolError(f"shared memory {path} has {os.fstat(own).st_size} bytes, not {size}")
        on_error.pop_all()
    return own


class Patchwork:
    """A flat tensor in private memory, over parts of which pages of shared files can be mapped.

    Each server keeps the values of its buckets in a file. A worker maps the files of all servers of its host into one
    tensor.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._map = mmap.mmap(
            -1, max(mmap.PAGESIZE, _to_pages(numel * dtype.itemsize)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self.tensor = torch.frombuffer(self._map, dtype=dtype)[:numel]
        self._patches: list[tuple[int, int]] = []

    def can_patch(self, start: int) -> bool:
        """Tell whether an element is the first of a page."""
        return start * self.tensor.itemsize % mmap.PAGESIZE == 0

    def patch(self, start: int, length: int, fd: int, file_start: int) -> None:
        """Map elements of a file at ``start``. The former content is lost, up to the end of the last page.

        Args:
            start: first element; must be the first of a page.
            length: elements.
            fd: the file; may be closed afterwards.
            file_start: first element inside the file; must be the first of a page.

        Raises:
            OSError: the file cannot be mapped.
        """
        place, size = start * self.tensor.itemsize, _to_pages(length * self.tensor.itemsize)
        self._put(place, size, mmap.MAP_SHARED, fd, file_start * self.tensor.itemsize)
        self._patches.append((place, size))

    def detach(self) -> None:
        """Replace all mapped pages by private copies of their present content."""
        while self._patches:
            place, size = self._patches.pop()
            content = bytes(memoryview(self._map)[place : place + size])
            self._put(place, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            ctypes.memmove(self._address + place, content, size)

    @property
    def _address(self) -> int:
        return self.tensor.data_ptr()

    def _put(self, place: int, size: int, flags: int, fd: int, offset: int) -> None:
        """Replace pages of the private memory; all of them belong to our own mapping."""
        assert 0 <= place <= place + size <= len(self._map)
        wanted = self._address + place
        found = _system_mmap()(wanted, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, fd, offset)
        if found != wanted:
            raise OSError(ctypes.get_errno(), f"{size} bytes of shared memory cannot be mapped")


@functools.cache
def _system_mmap() -> Any:
    """Return the function of the C library, which maps at a given place, as Python's does not."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return function


# ---- page-locked memory ----------------------------------------------------------------------------------------------


def pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Lock the host memory of a tensor for a CUDA device, and so for all; returns whether that worked.

    Without it copies are slower, and as correct.
    """
    if not memory.numel():
        return False
    with torch.cuda.device(device):  # else CUDA would take memory of the first one, too
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
        if error:
            # CUDA reports it again at the next kernel of this thread, and so at one that has not failed.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, dtype=torch.float32, device=device)
    return not error


def unpin(memory: torch.Tensor) -> None:
    """Undo :func:`pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
