"""What DistributedOptimizer needs of a strategy: one way to bring the gradients of all workers into an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from paceline.compression import Compression
from paceline.kvstore.base import KVStoreBase
from paceline.optim.buffers import Buffers
from paceline.optim.choices import Choices
from paceline.optim.samples import Samples
from paceline.optim.watch import ModelWatch

Named: TypeAlias = Sequence[tuple[str, torch.nn.Parameter, int]]
"""Name, parameter and index of the param group of each parameter."""
Closure: TypeAlias = Callable[[], Any]


@dataclass(frozen=True)
class Setup:
    """All that a strategy is made of, besides its store.

    Attributes:
        inner: the user's optimizer.
        named: its parameters.
        choices: of the user.
        model: the network, if it is known.
        samples: of this worker.
        compression: settings of codecs; None or empty: no compression.
    """

    inner: torch.optim.Optimizer
    named: Named
    choices: Choices
    model: torch.nn.Module | None
    samples: Samples
    compression: Compression | None


class Strategy(Protocol):
    """Gradients of all workers in, new weights out.

    Attributes:
        scales_by_itself: ``step`` divides by the scale of a GradScaler; else the scaler does it as with any optimizer.
        model_watch: of the model, if it is known. Hooks of parameters keep the strategy, and so the watch, also where a
            loop drops the DistributedOptimizer.
        skipped_steps: steps that were skipped because gradients were not finite.
    """

    scales_by_itself: bool
    skipped_steps: int
    model_watch: ModelWatch | None

    @property
    def store(self) -> KVStoreBase:
        """The store that gradients go through."""

    @property
    def buffers(self) -> Buffers | None:
        """The model's buffers, where workers share them."""

    def step(
        self, closure: Closure | None, scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None
    ) -> Any:
        """Apply the gradients of all workers; returns what the closure returned.

        Args:
            closure: computes the loss.
            scale: of a GradScaler, which gradients are divided by.
            found_inf: whether the GradScaler found Inf; then the step is skipped.
        """

    def synchronize(self) -> None:
        """Wait until the weights of the last step have arrived."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients."""

    def broadcast_weights(self) -> None:
        """Make rank 0's weights those of all workers and servers. Every worker calls it."""

    def check_extendable(self) -> None:
        """Refuse new param groups where they cannot be added."""

    def add(self, named: Named) -> None:
        """Add the parameters of new param groups; every worker does."""

    def fetch_states(self) -> dict[str, Any]:
        """Put the state into the user's optimizer; returns entries to be saved with it."""

    def give_states(self, saved: Mapping[str, Any]) -> None:
        """Take the state from the user's optimizer, and the entries that :meth:`fetch_states` returned."""

    def close(self) -> None:
        """Stop watching backward passes."""
