"""Strategies in which the optimizer runs in this process: on its own gradients, or on merged ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.errors import NonFiniteError, PacelineError
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.weights import Weights
from paceline.optim.backward import BackwardWatch
from paceline.optim.buffers import Buffers
from paceline.optim.codec_states import codec_entry, set_residuals
from paceline.optim.finite import WAY_OUT, is_finite, listed, sums_up
from paceline.optim.strategy import Closure, Named, StrategySetup
from paceline.optim.watch import ModelWatch


class LocalUpdate:
    """Steps on this process's own gradients. Base of the strategies in which the worker steps.

    Args:
        setup: the optimizer, its parameters and the user's options.
        store: the parameters' store; nothing is pushed to it.
    """

    scales_by_itself = False

    def __init__(self, setup: StrategySetup, store: KVStoreBase) -> None:
        self.inner, self.named, self.choices = setup.inner, list(setup.named), setup.choices
        self.store = store
        self.buffers: Buffers | None = None
        self.model_watch: ModelWatch | None = None
        self.skipped_steps = 0
        self.weights = Weights.of(store)

    def step(
        self, closure: Closure | None, scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None
    ) -> Any:
        """Step on merged gradients. A closure's loss is merged too, so that all workers decide the same.

        ``scale`` and ``found_inf`` are not used: a GradScaler unscales these gradients itself.
        """
        loss = None
        if closure is not None:
            loss = self.inner.step(lambda: self._merged_closure(closure))
        elif self._prepare():
            self.inner.step()
        self.weights.ended()
        return loss

    def _merged_closure(self, closure: Closure) -> Any:
        loss = self.merge_loss(closure())
        with torch.no_grad():
            if not self._prepare():
                raise NonFiniteError("gradients are not finite; a step with a closure cannot be skipped")
        return loss

    @torch.no_grad()
    def _prepare(self) -> bool:
        """Merge, check and clip the gradients; returns whether the optimizer steps."""
        self.finish()
        bad = self._not_finite()
        if bad and self.choices.on_nan == "error":
            raise self.blame(bad)
        if bad and self.choices.on_nan == "skip":
            self.skipped_steps += 1
            return False
        params = [param for _, param, _ in self.named]
        if self.choices.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, self.choices.clip_norm)
        if self.choices.clip_value is not None:
            torch.nn.utils.clip_grad_value_(params, self.choices.clip_value)
        return True

    def finish(self) -> None:
        """Merge gradients that are not merged yet."""

    def merge_loss(self, loss: Any) -> Any:
        """Return the loss over the samples of all workers."""
        return loss

    def _not_finite(self) -> list[str]:
        """Return the names of the parameters whose merged gradient is not finite now."""
        if self.choices.on_nan == "pass" or not self.suspicious():
            return []
        return [name for name, param, _ in self.named if param.grad is not None and not is_finite(param.grad)]

    def suspicious(self) -> bool:
        """Return whether a merged gradient may be NaN or Inf: a cheap check. False is certain, True is not."""
        return any(param.grad is not None and not sums_up(param.grad) for _, param, _ in self.named)

    def blame(self, names: Sequence[str]) -> NonFiniteError:
        """Return the error about gradients that are not finite."""
        return NonFiniteError(f"the gradient of {listed(names)} is NaN or Inf; {WAY_OUT}")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients, as with DistributedDataParallel."""
        yield

    def synchronize(self) -> None:
        """Do nothing: the weights of the last step are in place."""

    def broadcast_weights(self) -> None:
        """Do nothing: no other worker has these weights."""

    def check_extendable(self) -> None:
        """Do nothing: param groups may be added at any time."""

    def add(self, named: Named) -> None:
        """Add the parameters of new param groups."""
        self.named += named

    def show_states(self) -> None:
        """Do nothing: the user's optimizer has its state."""

    def take_states(self) -> None:
        """Do nothing: the user's optimizer has its state."""

    def fetch_states(self) -> dict[str, Any]:
        """Return the states of codecs; the user's optimizer has its own state."""
        return codec_entry(self.store, {})

    def give_states(self, saved: Mapping[str, Any]) -> None:
        """Set the residuals of this worker's pushes."""
        set_residuals(self.store, saved)

    def close(self) -> None:
        """Do nothing: no backward pass is watched."""


class MergingUpdate(LocalUpdate):
    """Merges gradients at the end of each backward pass.

    Args:
        setup: the optimizer, its parameters and the user's options.
        store: merges the gradients.
    """

    def __init__(self, setup: StrategySetup, store: KVStoreBase) -> None:
        super().__init__(setup, store)
        self._samples = setup.samples
        adds_up = self.choices.reduction == "sum"
        self._watch = BackwardWatch(self._on_gradient, self._on_end, self._refuse_merged if adds_up else None)
        self._watch.watch(param for _, param, _ in self.named)
        self._passes = 0
        self._syncs = True
        self._is_merged = False
        """True when gradients were merged after the last step, and no gradient was computed since."""
        self._sums: set[torch.nn.Parameter] = set()
        """Parameters whose gradients are sums over workers since the last merge."""

    def _merges_now(self) -> bool:
        return self._syncs and self._passes + 1 >= self.choices.passes

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        self._samples.touch()
        self._is_merged = False
        if self._merges_now():
            with torch.no_grad():
                self.complete(param)

    def _on_end(self) -> None:
        if self._merges_now():
            with torch.no_grad():
                self._merge()
        else:
            self._passes += 1
        self._samples.ended()

    def has_gradients(self) -> bool:
        """Return whether any parameter has a gradient."""
        return any(param.grad is not None for _, param, _ in self.named)

    def finish(self) -> None:
        """Merge gradients that no backward pass merged: set by hand, or accumulated in :meth:`no_sync`."""
        if not self._is_merged:
            self._merge()
        self._is_merged = False

    def _merge(self) -> None:
        self._passes = 0
        for param in list(self._sums):
            self._refuse_merged(param)
        self.merge()
        self._is_merged = True
        if self.choices.reduction == "sum":
            self._sums = {param for _, param, _ in self.named}

    def _refuse_merged(self, param: torch.nn.Parameter) -> None:
        """Raise when a sum would be merged again: each worker would add it. (Equal means can be merged again.)"""
        if param in self._sums and param.grad is not None and bool(param.grad.any()):
            name = next(name for name, one, _ in self.named if one is param)
            raise PacelineError(
                f"the gradient of {name!r} is summed over the workers already, and would be summed again: with "
                "reduction='sum' call zero_grad before the next backward, set backward_passes_per_step, or use no_sync"
            )
        self._sums.discard(param)

    def close(self) -> None:
        """Stop watching backward passes."""
        self._watch.close()

    def complete(self, param: torch.nn.Parameter) -> None:
        """Handle a gradient that is complete, while backward still runs."""

    def merge(self) -> None:
        """Merge all gradients, and copy the merged ones to the parameters."""
        raise NotImplementedError

    def add(self, named: Named) -> None:
        """Add the parameters of new param groups; every worker does."""
        super().add(named)
        self._watch.watch(param for _, param, _ in named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients; the first backward pass after it, or ``step``, merges them."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before
