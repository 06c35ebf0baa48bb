"""The ``local`` store: merges and updates in CPU memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.keys import Key
from paceline.kvstore.inprocess.store import InProcessStore


class LocalStore(InProcessStore):
    """Copies all gradients to CPU memory, sums them there and updates the weights there (MXNet's ``local``)."""

    _TYPE = "local"

    def _initial(self, value: torch.Tensor) -> torch.Tensor:
        return value.cpu()

    def _place(self, values: Mapping[Key, Sequence[torch.Tensor]]) -> None:
        """Do nothing: all values are in CPU memory."""
