"""Interface between a trainer and the place where its optimizer runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import torch

from paceline.keys import Key
from paceline.kvstore.base import KVStoreBase
from paceline.mx.gluon.parameter import Parameter
from paceline.updaters.rows import to_rows

States: TypeAlias = dict[Key, dict[str, Any]]


class UpdatesByHand(Protocol):
    """The two halves of a step. A loop may change the gradients between them."""

    def allreduce(self, trained: Mapping[str, Parameter], scale: float = 1.0) -> None:
        """Sum the gradients, times ``scale``, over devices and workers, in place."""

    def update(self, trained: Mapping[str, Parameter], scale: float, step: int) -> None:
        """Update every device's values from its gradients."""


class Updates(Protocol):
    """Turns gradients of all devices and workers into new values.

    Attributes:
        on_store: the store runs the optimizer, not the devices.
    """

    on_store: bool

    def start(self, everything: Mapping[str, Parameter], trained: Mapping[str, Parameter]) -> None:
        """Set up the optimizer, with rank 0's values on all devices and workers."""

    def step(self, trained: Mapping[str, Parameter], scale: float, step: int, samples: float) -> None:
        """Update all values from gradients.

        Args:
            trained: parameters by key.
            scale: factor that turns sums into gradients.
            step: number of the step, from 0.
            samples: samples behind this worker's gradients.
        """

    def by_hand(self, verb: str) -> UpdatesByHand:
        """Return the object that runs the two halves of a step.

        Args:
            verb: the caller's method, for the error.

        Raises:
            ValueError: the store runs the optimizer.
        """

    def assign(self, key: str, value: torch.Tensor) -> None:
        """Set a value where the optimizer runs."""

    def take(self, everything: Mapping[str, Parameter]) -> None:
        """Read the values of all parameters from the devices. Every worker calls it."""

    def states(self) -> States:
        """Return the optimizer's state by key."""

    def set_states(self, states: States) -> None:
        """Set the optimizer's state. Every worker calls it."""

    def save(self, fname: str) -> None:
        """Write the optimizer's state."""

    def load(self, fname: str) -> None:
        """Read the optimizer's state."""


def broadcast(store: KVStoreBase, parameters: Mapping[str, Parameter], by_rows: bool, prefix: str = "") -> None:
    """Copy rank 0's values to all devices and workers, those of frozen parameters too.

    Args:
        store: the parameters' store.
        parameters: parameters by key.
        by_rows: keep row-sparse parameters as rows in the store.
        prefix: prefix of the keys in the store.
    """
    outs = [one.list_data() for one in parameters.values()]
    values = [
        to_rows(out[0]) if by_rows and one.is_row_sparse else out[0]
        for one, out in zip(parameters.values(), outs, strict=True)
    ]
    store.broadcast([prefix + key for key in parameters], values, outs)
