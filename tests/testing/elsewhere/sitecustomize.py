"""Hides from paceline what only Linux has; Python reads this at its start, where the folder is on the path."""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import os
import select
import socket
import sys
from collections.abc import Callable
from typing import Any

HIDDEN = {
    os: ("eventfd", "memfd_create", "pidfd_open", "pipe2", "posix_fallocate", "sched_getaffinity", "waitid"),
    socket: ("AF_NETLINK", "SO_PEERCRED", "TCP_INFO", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT"),
    select: ("POLLRDHUP", "epoll"),
    fcntl: ("F_GETPIPE_SZ", "F_SETPIPE_SZ"),
}


def _is_paceline() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("paceline")


def _without_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    def asked(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).startswith("/proc") and _is_paceline():
            raise FileNotFoundError(2, "hidden", path)
        return function(path, *args, **options)

    return asked


def _refuse_abstract(function: Callable[..., Any]) -> Callable[..., Any]:
    def asked(sock: socket.socket, address: Any) -> Any:
        if isinstance(address, bytes) and address.startswith(b"\0"):
            raise OSError(22, "hidden")
        return function(sock, address)

    return asked


class _Library:
    """The C library without prctl."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        if name == "prctl":
            raise AttributeError(name)
        return getattr(self._library, name)


for module, names in HIDDEN.items():
    for one in names:
        if hasattr(module, one):
            delattr(module, one)
builtins.open = _without_proc(builtins.open)
os.open, os.readlink, os.listdir = (_without_proc(one) for one in (os.open, os.readlink, os.listdir))
_load = ctypes.CDLL
ctypes.CDLL = lambda name, *args, **options: (
    _Library(_load(name, *args, **options)) if name is None and _is_paceline() else _load(name, *args, **options)
)


class _Socket(socket.socket):
    bind = _refuse_abstract(socket.socket.bind)
    connect = _refuse_abstract(socket.socket.connect)


socket.socket = _Socket
