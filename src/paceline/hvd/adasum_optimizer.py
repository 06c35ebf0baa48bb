"""The optimizer with Adasum: each rank steps by itself, and the changes of the weights are combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from paceline.hvd.collectives import allreduce_async_, synchronize
from paceline.hvd.starting import Adasum


class AdasumMethods:
    """What the class of an Adasum optimizer adds to that of the user's optimizer."""

    _hvd_named: list[tuple[str, torch.nn.Parameter]]
    _hvd_compression: Any

    @property
    def _requires_update(self) -> set[torch.nn.Parameter]:
        return {param for _, param in self._hvd_named if param.requires_grad}

    @property
    def _handles(self) -> dict[torch.nn.Parameter, Any]:
        """Empty: nothing is on its way between calls of ``step``."""
        return {}

    def synchronize(self) -> None:
        """Do nothing: changes of weights are reduced in ``step``."""

    def skip_synchronize(self) -> NoReturn:
        """Refuse.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients are added up until ``step``."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and combine the changes of all ranks."""
        named = [(name, param) for name, param in self._hvd_named if param.requires_grad]
        before = [param.detach().clone() for _, param in named]
        result = super().step(closure)  # type: ignore[misc]
        waiting = []
        for (name, param), start in zip(named, before, strict=True):
            compressed, context = self._hvd_compression.compress((param.detach() - start).contiguous())
            waiting.append((allreduce_async_(compressed, None, name, Adasum), context))
        with torch.no_grad():
            for (_, param), start, (handle, context) in zip(named, before, waiting, strict=True):
                param.copy_(start + self._hvd_compression.decompress(synchronize(handle), context))
        return result
