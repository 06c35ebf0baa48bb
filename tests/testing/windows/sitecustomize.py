"""Hides from paceline what Windows does not have; Python reads this at its start, where the folder is on the path.

Only modules of paceline see it: the standard library needs the system that is there.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import runpy
import sys
import types
from pathlib import Path
from typing import Any

runpy.run_path(str(Path(__file__).parents[1] / "elsewhere/sitecustomize.py"))  # no /proc, no memfd

#: By module: the names that typeshed has for other systems only, as far as paceline uses any of them.
HIDDEN = {
    "os": (
        "CLD_EXITED O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK P_PID WEXITED WNOHANG WNOWAIT chown fork "
        "fstatvfs geteuid getgid getpgid getpgrp getsid getuid killpg mkfifo nice pread pwrite "
        "register_at_fork set_blocking setsid statvfs sysconf tcgetpgrp uname waitid"
    ),
    "socket": "AF_UNIX MSG_DONTWAIT SO_PEERCRED SO_REUSEPORT",
    "signal": (
        "SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGUSR1 SIGUSR2 SIG_BLOCK SIG_SETMASK pthread_sigmask"
    ),
    "select": "POLLHUP POLLIN POLLOUT poll",
    "mmap": "MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    "sys": "",
}
ABSENT = {"fcntl", "pwd", "resource", "termios", "tty"}


class _OfWindows(types.ModuleType):
    """A module of the standard library without the names that Windows does not have."""

    def __init__(self, real: types.ModuleType, hidden: str) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _hidden=frozenset(hidden.split()))

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(f"hidden: {self.__name__}.{name}")
        return "win32" if (self.__name__, name) == ("sys", "platform") else getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


def _asker() -> str:
    """Return the module of paceline that imports, also by way of importlib; empty for others."""
    frame: types.FrameType | None = sys._getframe(1).f_back
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("importlib"):
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name if name == "paceline" or name.startswith("paceline.") else ""


def _shown(name: str, found: Any) -> Any:
    if name in ABSENT:
        raise ModuleNotFoundError(f"No module named {name!r}")
    return _views.get(name, found)


def _import(name: str, *args: Any, **options: Any) -> Any:
    found = _real_import(name, *args, **options)
    return _shown(name, found) if _asker() else found


def _import_module(name: str, package: str | None = None) -> Any:
    found = _real_import_module(name, package)
    return _shown(name, found) if _asker() else found


_views = {name: _OfWindows(__import__(name), hidden) for name, hidden in HIDDEN.items()}
_real_import = builtins.__import__
builtins.__import__ = _import
_real_import_module = importlib.import_module
importlib.import_module = _import_module
_load = ctypes.CDLL
ctypes.CDLL = lambda name, *args, **options: _load(None if name == "msvcrt" else name, *args, **options)  # type: ignore
