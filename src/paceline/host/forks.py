"""Makes the children that a process forks harmless.

A child of ``os.fork()`` (of a ``DataLoader``, a ``multiprocessing`` pool, a ``Popen`` with ``preexec_fn``) has copies
of all objects and file descriptors of its parent, but only the thread that forked.

| danger | remedy |
|---|---|
| a copy of a socket or pipe keeps it open after the parent was killed: its death is not noticed | the child closes it |
| a thread that is missing in the child held a lock | the child replaces it; exits and ``close`` do nothing there |
| the child uses a connection, and disturbs the parent's | it has none; an attempt to use one raises an error |

Children made with vfork, which ``subprocess`` uses, need none of this: they become another program at once. Children
that C code forks run no function of Python: they keep the copies until they end.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_actions: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
_passing_on = threading.local()


def in_children(one: T, action: Callable[[T], None]) -> T:
    """Call ``action(one)`` in every child, as long as the object lives; returns the object.

    Actions must not wait for a lock: its holder at the fork may not exist in the child.
    """
    _actions[one] = action
    return one


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let no thread fork before the end of the block: for opening a file and registering it. It must not wait."""
    with _lock:
        yield


@contextlib.contextmanager
def passing_on() -> Iterator[None]:
    """Do nothing in children that this thread forks in the block: they are meant to share its connections."""
    _passing_on.active = True
    try:
        yield
    finally:
        _passing_on.active = False


def _in_child() -> None:
    _lock.release()
    if getattr(_passing_on, "active", False):
        return
    for one, action in list(_actions.items()):
        with contextlib.suppress(OSError):
            action(one)


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)


def error_text(whom: str, pid: int) -> str:
    """Return the error text for a process that was forked from another one, as in ``worker 3``."""
    return (
        f"process {os.getpid()} was forked from {whom} (pid {pid}), and its stores and groups belong to that process: "
        "connections do not survive a fork. Use them there; give a child copies of tensors, or start it with the "
        "method 'spawn' of multiprocessing"
    )
