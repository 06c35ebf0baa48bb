"""Answers of a process group about itself, for torch.distributed: rank, size, names and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import distributed as dist

from paceline.torch_hooks.untraced import untraced

#: Its stubs have one signature of the many that a subclass may have.
_ProcessGroup: Any = dist.ProcessGroup


@untraced
class DescribedGroup(_ProcessGroup):  # type: ignore[misc]
    """The base of a process group."""

    #: What it cannot do: ``split_group``, ``shrink_group``, several operations in one call, and what PyTorch 2.14 adds,
    #: which asks a backend in C++ where this class has no answer.
    supports_splitting = supports_shrinking = supports_coalescing = supports_reconfigure = supports_window = False

    def __init__(self, name: str, members: Sequence[int], worker: int) -> None:
        self._members, self._place = list(members), list(members).index(worker)
        super().__init__(self._place, len(members))
        self._named, self._described = name, ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return "paceline"

    def getRank(self) -> int:  # noqa: N802
        """Return this process's rank in the group."""
        return self._place

    def getSize(self) -> int:  # noqa: N802
        """Return the number of ranks."""
        return len(self._members)

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name by which PyTorch finds the group."""
        return self._named

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Change that name."""
        self._named = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return PyTorch's note of the purpose of the group."""
        return self._described

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        """Change that note."""
        self._described = text

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it takes: PyTorch knows them of its own backends only."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return [torch.device("cpu"), *([] if accelerator is None else [accelerator])]

    def _get_backend(self, device: torch.device) -> Self:
        """Return the group, which moves the tensors of every device."""
        return self
