"""paceline: data-parallel training of PyTorch models on machines that are different.

Importing paceline starts nothing, and imports nothing before it is used.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # the module typing takes time, in which Ctrl-C would show a traceback
if TYPE_CHECKING:
    from typing import Any

    from paceline import compression, data, errors, gluon, hvd, kvstore, mx, optim, updaters
    from paceline import lightning as lightning  # not in __all__: it needs an extra
    from paceline.extensions import register
    from paceline.mx.context import Context, cpu, gpu, num_gpus
    from paceline.mx.module import Module
    from paceline.observe.reports import report
    from paceline.optim import DistributedOptimizer
    from paceline.saving import load, save
    from paceline.worker.notice import notice

    __version__: str

if sys.platform.startswith("win"):
    raise ImportError(
        "paceline runs on Linux and on macOS. On Windows, install and run it in WSL 2: "
        "https://learn.microsoft.com/windows/wsl"
    )

_MODULES = ("compression", "data", "errors", "gluon", "hvd", "kvstore", "lightning", "mx", "optim", "updaters")

_NAMES = {
    "Context": "paceline.mx.context",
    "DistributedOptimizer": "paceline.optim",
    "Module": "paceline.mx.module",
    "cpu": "paceline.mx.context",
    "gpu": "paceline.mx.context",
    "load": "paceline.saving",
    "notice": "paceline.worker.notice",
    "num_gpus": "paceline.mx.context",
    "register": "paceline.extensions",
    "report": "paceline.observe.reports",
    "save": "paceline.saving",
}

__all__ = [
    "Context",
    "DistributedOptimizer",
    "Module",
    "__version__",
    "compression",
    "cpu",
    "data",
    "errors",
    "gluon",
    "gpu",
    "hvd",
    "kvstore",
    "load",
    "mx",
    "notice",
    "num_gpus",
    "optim",
    "register",
    "report",
    "save",
    "updaters",
]


if not TYPE_CHECKING:  # a checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"paceline.{name}")
        if name in _NAMES:
            return getattr(importlib.import_module(_NAMES[name]), name)
        if name == "__version__":
            return _installed_version()
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def _installed_version() -> str:
    """Return the version of the package that is installed."""
    from importlib import metadata

    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:  # a copy of the sources
        return "unknown"


def __dir__() -> list[str]:
    from importlib.util import find_spec

    # help() reads every name that is here, and paceline.lightning cannot be read without its extra.
    return sorted([*__all__, *(["lightning"] if find_spec("lightning") else [])])
