"""All scripts, by name."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tests.oracle import scripts
from tests.oracle.run import Result, Run, tensors_of

#: Equal to one process; with this worker's own gradients, as they are at ``step``; an error, in the step in which it
#: matters; or an error at once, when the optimizer is given to ``DistributedOptimizer``.
Fate = Literal["equal", "at step", "refused in its step", "refused at once"]


@dataclass(frozen=True)
class Script:
    """One script, and what is to be expected of it.

    Attributes:
        name: of the function.
        function: the training loop.
        server: what becomes of it with ``update="server"``.
        worker: with ``update="worker"``.
        other: in modes without merged gradients, with one worker.
        dtype: of its nets; double where its arithmetic is chaotic, so that rounding grows beyond the tolerance.
        alone: its oracle, where that is not the joined batch.
    """

    name: str
    function: Callable[[Run], Result]
    server: Fate
    worker: Fate
    other: Fate
    dtype: torch.dtype
    alone: Callable[[Run], Result] | None

    def fate(self, update: str) -> Fate:
        """Return what becomes of it in ``dist_sync``."""
        return self.worker if update == "worker" else self.server

    def run(self, run: Run) -> dict[str, torch.Tensor]:
        """Run it and return its result as named tensors."""
        before = torch.get_default_dtype()
        torch.manual_seed(1000 + run.rank)
        torch.set_default_dtype(self.dtype)
        try:
            function = self.alone if run.joined and self.alone is not None else self.function
            with torch.device(run.device) if run.device != "cpu" else contextlib.nullcontext():
                return tensors_of(function(run))
        finally:
            torch.set_default_dtype(before)


_found: dict[str, Script] = {}


def script(
    server: Fate,
    *,
    worker: Fate = "equal",
    other: Fate = "equal",
    dtype: torch.dtype = torch.float32,
    alone: Callable[[Run], Result] | None = None,
    name: str = "",
) -> Callable[[Callable[[Run], Result]], Callable[[Run], Result]]:
    """Make a function a script."""

    def note(function: Callable[[Run], Result]) -> Callable[[Run], Result]:
        called = name or function.__name__
        assert called not in _found, f"two scripts are named {called}"
        elsewhere = server if server == "refused at once" else other
        _found[called] = Script(called, function, server, worker, elsewhere, dtype, alone)
        return function

    return note


def all_scripts() -> dict[str, Script]:
    """Return all scripts."""
    for module in pkgutil.iter_modules(scripts.__path__, scripts.__name__ + "."):
        importlib.import_module(module.name)
    return _found


def named(names: list[str]) -> list[Script]:
    """Return some scripts."""
    found = all_scripts()
    return [found[name] for name in names]


def as_lists(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors as JSON values."""
    return {name: one.double().reshape(-1).tolist() for name, one in tensors.items()}
