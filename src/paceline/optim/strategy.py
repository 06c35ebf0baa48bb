"""Interface of the strategies of DistributedOptimizer: each is one way to update with the gradients of all workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from paceline.compression import Compression
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.weights import Weights
from paceline.optim.buffers import Buffers
from paceline.optim.choices import MergeChoices
from paceline.optim.names import NamedParameter
from paceline.optim.samples import SampleCounter
from paceline.optim.watch import ModelWatch

Named: TypeAlias = Sequence[NamedParameter]
Closure: TypeAlias = Callable[[], Any]


@dataclass(frozen=True)
class StrategySetup:
    """Arguments of a strategy, except its store.

    Attributes:
        inner: the user's optimizer.
        named: its parameters.
        choices: the user's options.
        model: the network, if it is known.
        samples: counts this worker's samples.
        compression: settings of codecs; None or empty: no compression.
    """

    inner: torch.optim.Optimizer
    named: Named
    choices: MergeChoices
    model: torch.nn.Module | None
    samples: SampleCounter
    compression: Compression | None


class Strategy(Protocol):
    """Turns the gradients of all workers into new weights.

    Attributes:
        scales_by_itself: ``step`` divides by the scale of a GradScaler; else the scaler does it as with any optimizer.
        model_watch: the watch of the model, if it is known. Hooks of parameters keep the strategy alive, and so the
            watch, also after a loop has dropped the DistributedOptimizer.
        skipped_steps: steps that were skipped because gradients were not finite.
        weights: to which round the parameters belong.
    """

    scales_by_itself: bool
    skipped_steps: int
    weights: Weights
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
            scale: scale of a GradScaler; gradients are divided by it.
            found_inf: whether the GradScaler found Inf; then the step is skipped.
        """

    def synchronize(self) -> None:
        """Wait until the weights of the last step have arrived."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients."""

    def broadcast_weights(self) -> None:
        """Set the weights of all workers and servers to rank 0's. Every worker calls it."""

    def check_extendable(self) -> None:
        """Raise an error where param groups cannot get or lose parameters."""

    def add(self, named: Named) -> None:
        """Add the parameters of new param groups. Every worker calls it."""

    def show_states(self) -> None:
        """Put the state into the user's optimizer, where it is somewhere else and was not put there since the step."""

    def take_states(self) -> None:
        """Use the state of the user's optimizer, which was replaced. Every worker calls it."""

    def fetch_states(self) -> dict[str, Any]:
        """Put the state into the user's optimizer; returns further entries of the ``state_dict``."""

    def give_states(self, saved: Mapping[str, Any]) -> None:
        """Load the state from the user's optimizer and from the entries that :meth:`fetch_states` returned."""

    def close(self) -> None:
        """Stop watching backward passes."""
