"""The last events of this process: a ring of fixed-size records in a memory-backed file, which survives the process.

:mod:`paceline.observe.events` has the kinds of events. :func:`note` takes no lock and waits for nothing. Forked
children note nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import math
import mmap
import os
import re
import shutil
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import get_ident
from typing import BinaryIO

from paceline.config import Settings
from paceline.errors import LaunchError
from paceline.host import forks
from paceline.host.user_folder import folder
from paceline.observe.events import MOST_S, RECORD, Event, Source, member, member_of, parse

logger = logging.getLogger(__name__)

#: Events of a ring, and jobs that have ended whose rings are kept.
CAPACITY, KEPT_JOBS = 8192, 4

#: Rings of a job on one host that are kept in any case: jobs without a key that are started by hand share a folder.
KEPT_RINGS = 256

#: Names that are tried for a ring: as many processes of one number share the folder.
_MOST_NAMES = 4096

#: Free memory that a new ring finds at least, in rings: data loaders share tensors in the same file system.
_SPARE = 32

#: File of the other hosts of a job.
_HOSTS = "hosts"

#: Magic, version, capacity, pid, member; the clock's distance to Unix time and to the scheduler's, and its error; host.
_HEADER = struct.Struct("<8sIIIIddd64s")
_MAGIC, _VERSION, _HEADER_BYTES = b"paceline", 1, 4096
_MEMBER, _CLOCK = struct.Struct("<I"), struct.Struct("<dd")
_MEMBER_AT, _CLOCK_AT = 20, 32
#: Looked up once: each part of a step is an event.
_SIZE, _write = RECORD.size, RECORD.pack_into


class Ring:
    """A ring over memory.

    Args:
        memory: :meth:`size` bytes, zeros at first.
        rank: its rank; -1: not known yet.
    """

    def __init__(
        self,
        memory: mmap.mmap | bytearray,
        role: str,
        rank: int,
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._capacity, self._clock, self._numbers = memory, capacity, clock, itertools.count(1)
        self.written = 0
        """Events so far."""
        unix, host = time.time() - clock(), socket.gethostname().encode()[:64]
        _HEADER.pack_into(
            memory, 0, _MAGIC, _VERSION, capacity, os.getpid(), member(role, rank), unix, 0.0, math.inf, host
        )

    @staticmethod
    def size(capacity: int = CAPACITY) -> int:
        """Return the bytes of a ring."""
        return _HEADER_BYTES + capacity * _SIZE

    def note(self, kind: int, number: int = 0, peer: int = 0, value: int = 0, at: float | None = None) -> None:
        """Write an event.

        Args:
            kind: one of the module's table.
            number: as the table says, 0 or more.
            peer: as :func:`member` has it.
            value: up to 65,535.
            at: the time; by default now.
        """
        count = self.written = next(self._numbers)
        _write(
            self._memory, _HEADER_BYTES + count % self._capacity * _SIZE, count,
            self._clock() if at is None else at, get_ident(), number, peer, value, kind, count,
        )  # fmt: skip

    def since(self, count: int, most: int) -> tuple[bytes, int]:
        """Return the records after a number, at most so many, and how many of these are written over already."""
        first = max(count, self.written - self._capacity)
        places = (_HEADER_BYTES + one % self._capacity * _SIZE for one in range(first + 1, self.written + 1))
        found = b"".join(bytes(self._memory[at : at + _SIZE]) for at in itertools.islice(places, most))
        return found, first - count

    def name(self, role: str, rank: int) -> None:
        """Write the role and the rank of this process."""
        _MEMBER.pack_into(self._memory, _MEMBER_AT, member(role, rank))

    def align(self, offset: float, error: float) -> None:
        """Write the distance of this clock to the scheduler's, and the bound of its error."""
        _CLOCK.pack_into(self._memory, _CLOCK_AT, offset, error)


def _opened(path: Path) -> BinaryIO:
    """Open a ring; a pipe or a link in its place is none.

    Raises:
        OSError: it cannot be read.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, f"{path} is no file")
    return file


def read(path: Path) -> tuple[Source, list[Event]]:
    """Return the process of a ring's file, and its events.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no ring.
    """
    with _opened(path) as file:
        data = file.read(Ring.size() + 1)
    if len(data) < _HEADER_BYTES:
        raise ValueError(f"{path} is no ring of events")
    magic, version, capacity, pid, peer, unix, offset, error, host = _HEADER.unpack_from(data)
    is_sane = abs(unix) <= MOST_S and abs(offset) <= MOST_S and error >= 0
    if (magic, version) != (_MAGIC, _VERSION) or len(data) != Ring.size(capacity) or not is_sane:
        raise ValueError(f"{path} is no ring of events of version {_VERSION}")
    source = Source(*member_of(peer), host.rstrip(b"\0").decode(errors="replace"), pid, unix, offset, error)
    return source, parse(data[_HEADER_BYTES:])


# ---- the ring of this process ----------------------------------------------------------------------------------------


def _nothing(*event: object) -> None:
    """Do nothing: this process has no ring."""


#: Writes an event of this process, see :meth:`Ring.note`. Call it as ``ring.note``, because it changes.
note: Callable[..., None] = _nothing

active: Ring | None = None
_file: int | None = None


def start(settings: Settings) -> None:
    """Note events of this process from now on. Where its file cannot be made, the log says so, and there are none."""
    global note, active, _file
    if not settings.recorder or active is not None:
        return
    try:
        path = folder_of(settings.job_id, settings.job_key, settings.restart)
        forget_old(_made(path))
        with forks.held():
            _file = _new_file(path, f"{settings.role}-{os.getpid()}")
            _reserve(_file, Ring.size())
            active = Ring(mmap.mmap(_file, Ring.size()), settings.role, settings.rank)
            forks.in_children(active, _forget)
        note = active.note
    except (OSError, LaunchError, ValueError) as error:
        logger.warning("paceline story will have no events of this process: %s", error)


def _new_file(folder: Path, name: str) -> int:
    """Make the file of a ring, and hold it.

    A file is never cut: a process that has it in its memory would end with SIGBUS. One of that name is left alone while
    its process runs (containers that share memory have processes of one number), and is replaced after its end. A
    process of another job may remove file and folder before they are held.

    Raises:
        OSError: it cannot be made.
    """
    number = 0
    while True:
        path = _made(folder) / (f"{name}.{number}.ring" if number else f"{name}.ring")
        _remove(path)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:  # the folder was removed meanwhile
            continue
        except FileExistsError:  # its process runs
            number += 1
            if number > _MOST_NAMES:
                raise
            continue
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)


def stop() -> None:
    """Note no more events; the file stays."""
    if active is not None:
        _forget(active)


def _forget(ring: Ring) -> None:
    global note, active, _file
    note, active = _nothing, None
    if _file is not None:
        os.close(_file)
        _file = None


def _reserve(file: int, size: int) -> None:
    """Give a file its bytes now: memory that is short later would end the process. Leaves most of it to others.

    Raises:
        OSError: there is too little.
    """
    if shutil.disk_usage(jobs_folder()).free < _SPARE * size:
        raise OSError(errno.ENOSPC, f"there are less than {_SPARE * size >> 20} MiB left for {jobs_folder()}")
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.write(file, bytes(size))


# ---- files -----------------------------------------------------------------------------------------------------------


def jobs_folder() -> Path:
    """Return the folder that has a folder of rings for each job.

    Raises:
        LaunchError: the user's folder cannot be used.
    """
    return folder() / "rings"


def folder_of(job_id: str, key: str, restart: int = 0) -> Path:
    """Return the folder of the rings of a job, of each of its starts another one: ``ID.HASH`` or ``ID.HASH.RESTART``.

    Jobs of one name have keys of their own.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
    return jobs_folder() / (re.sub(r"[^\w-]", "_", job_id) + f".{digest}" + (f".{restart}" if restart else ""))


def start_of(path: Path) -> tuple[str, int]:
    """Return the job of a folder of rings, and which of its starts it is, from 0."""
    job, _, rest = path.name.partition(".")
    number = rest.partition(".")[2]
    return job, int(number) if number.isdecimal() else 0


def _made(path: Path) -> Path:
    for one in (path.parent, path):
        one.mkdir(mode=0o700, exist_ok=True)
    return path


def forget_old(own: Path) -> None:
    """Delete the rings of jobs that have ended, except the last ones; and old ones of the own job, if it has many."""
    for path in sorted(own.glob("*.ring"), key=changed_at)[:-KEPT_RINGS]:
        _remove(path)
    others = [one for one in own.parent.iterdir() if one != own]
    for path in sorted(others, key=changed_at, reverse=True)[KEPT_JOBS - 1 :]:
        if not any(is_held(ring) for ring in path.glob("*.ring")):
            for one in sorted(path.glob("*"), key=lambda one: one.name == _HOSTS):
                _remove(one)
            with contextlib.suppress(OSError):  # a process has begun meanwhile
                path.rmdir()


@contextlib.contextmanager
def _taken_over(path: Path) -> Iterator[bool]:
    """Hold a file in the block, and tell whether that was possible: no process that runs has it."""
    is_free = True
    with contextlib.ExitStack() as files:
        with contextlib.suppress(OSError):  # no file that a process could hold
            file = files.enter_context(_opened(path))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_free = False
        yield is_free


def _remove(path: Path) -> None:
    """Delete a file unless its process runs. A process that has just opened it makes another."""
    with _taken_over(path) as is_free, contextlib.suppress(OSError):
        if is_free:
            path.unlink()


def changed_at(path: Path) -> float:
    """Return when a file or folder was changed last; 0 where it is gone."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def is_held(path: Path) -> bool:
    """Tell whether the process of a ring runs."""
    with _taken_over(path) as is_free:
        return not is_free


def rings(path: Path) -> Iterator[tuple[Source, list[Event], bool]]:
    """Return the processes of a job on this host, their events, and whether they run."""
    for one in sorted(path.glob("*.ring")):
        with contextlib.suppress(OSError, ValueError):
            yield *read(one), is_held(one)


def note_hosts(job_id: str, key: str, hosts: Sequence[str], restart: int = 0) -> None:
    """Write down the other hosts of a job, which keep events of their own.

    Raises:
        OSError: the folder cannot be written.
        LaunchError: it cannot be used.
    """
    if hosts:
        path = _made(folder_of(job_id, key, restart))
        (path / _HOSTS).write_text("".join(f"{host}\n" for host in hosts))


def made_folder(settings: Settings) -> Path:
    """Return the folder of the rings of this start of a job, made if need be: other files about the job are there, too.

    Raises:
        OSError: it cannot be made.
        LaunchError: it cannot be used.
    """
    return _made(folder_of(settings.job_id, settings.job_key, settings.restart))


def other_hosts(path: Path) -> list[str]:
    """Return the other hosts of a job, if its launcher ran here."""
    with contextlib.suppress(OSError):
        return (path / _HOSTS).read_text().split()
    return []
