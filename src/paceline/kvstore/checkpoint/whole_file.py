"""Atomic writes of files: a file is replaced as a whole, and then survives a power failure.

| step | action                                                     | a crash after it leaves                     |
|------|------------------------------------------------------------|---------------------------------------------|
| 1    | make ``<name>.<kernel>-<pid>-<token>.partial``, and lock it | the old file; an unlocked temporary file    |
| 2    | write, flush, ``fsync``                                    | the same                                    |
| 3    | rename it to the target                                    | the old or the new file, each whole         |
| 4    | ``fsync`` the folder                                       | the new file                                |

Errors of steps 1 to 3 leave the old file. From the rename on the new file counts: a folder that cannot be synced (some
network file systems) is a warning, because the old file is gone.

The kernel releases the lock however the process ends, so an unlocked temporary file is removed by the next writer. The
guarantee needs a file system whose rename is atomic and whose ``fsync`` reaches the disk. Locks may not reach other
kernels (network file systems), so temporary files of other kernels are removed a day after their last change.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from paceline.errors import CheckpointError

#: Locks may not reach other kernels: a temporary file of another kernel is stale this long after its last change.
STALE_S = 24 * 3600.0
log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TEMPORARY = re.compile(r"(?P<kernel>[0-9a-f]{8})-\d+-[0-9a-f]{8}\.partial")


class Draft:
    """A file that is being written.

    Attributes:
        file: the open temporary file.
        path: final path; until the end it may be set to another name in the same folder.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Draft]:
    """Write a file that replaces ``path`` when the block ends; if the block fails, ``path`` stays as it was.

    Several processes may write the same file: each has a temporary file, and the last rename wins. Temporary files of
    dead processes for this path are removed. If ``path`` is a symbolic link, its target is replaced.

    Raises:
        CheckpointError: the file cannot be written: the disk is full or read-only, or the folder does not exist;
            or ``path`` is no regular file.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not (target.is_file() or target.is_dir()):  # the rename would remove a device
            raise OSError(errno.EINVAL, "it is a pipe, a device or a socket")
        _remove_stale(target)
        temporary, file = _locked(target)
        draft, is_replaced = Draft(file, target), False
        try:
            yield draft
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(draft.path)
            is_replaced = True
        finally:
            with contextlib.suppress(OSError):  # its data are on the disk, or an error has been raised
                file.close()
            if not is_replaced:
                with contextlib.suppress(OSError):  # the next writer removes it
                    temporary.unlink(missing_ok=True)
        _sync_folder(draft.path)
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)} could not be written: {_why(error, target.parent)}") from error


def _why(error: OSError, folder: Path) -> str:
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        reason = f"there is no folder {folder}"
    elif error.errno in _FULL:
        with contextlib.suppress(OSError):
            reason += f" ({shutil.disk_usage(folder).free / 1e6:.1f} MB are free in {folder})"
    return f"{reason}. The old file is unchanged"


def _kernel() -> str:
    """Return the identifier of this boot of the kernel. Locks work between the processes of one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:  # not Linux
        return f"{uuid.getnode():012x}"[-8:]


def _locked(target: Path) -> tuple[Path, BinaryIO]:
    """Create a temporary file for ``target`` and lock it."""
    while True:
        token = uuid.uuid4().hex[:8]
        path = target.with_name(f"{target.name}.{_kernel()}-{os.getpid()}-{token}.partial")
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb")
        with contextlib.suppress(OSError):  # this file system has no locks: only the age shows that a file is stale
            fcntl.flock(file, fcntl.LOCK_EX)
        if _is(path, file):
            return path, file
        file.close()  # another process removed it as stale before it was locked


def _is(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _remove_stale(target: Path) -> None:
    for entry in os.scandir(target.parent):
        matched = entry.name.startswith(f"{target.name}.") and _TEMPORARY.fullmatch(entry.name[len(target.name) + 1 :])
        if matched and entry.is_file(follow_symlinks=False):  # to open a pipe would wait for who writes into it
            with contextlib.suppress(OSError):  # it is gone, or we may not remove it
                _remove_if_dead(Path(entry.path), matched["kernel"] == _kernel())


def _remove_if_dead(path: Path, is_of_this_kernel: bool) -> None:
    if time.time() - path.stat().st_mtime > STALE_S:
        path.unlink()
    elif is_of_this_kernel:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _sync_folder(path: Path) -> None:
    """Write the folder's new entry to the disk, if its file system can; else a warning says what that means."""
    try:
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this file system never syncs folders
            log.warning(
                "%s is written, but its folder could not be synced (%s): after a power failure the folder may "
                "still have the file from before. Save to a local disk if that matters",
                path,
                error.strerror or error,
            )
