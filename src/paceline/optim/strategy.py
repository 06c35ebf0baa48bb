"""Strategies of DistributedOptimizer: each is one way to update with the gradients of all workers.

| strategy              | the optimizer runs                    | gradients go through                           |
|-----------------------|---------------------------------------|------------------------------------------------|
| :class:`Strategy`     | in this process, on its own gradients | nothing                                        |
| :class:`MergedUpdate` | in every worker, on merged gradients  | an exchange whose answers are merged gradients |
| ``ServerUpdate``      | on the servers                        | an exchange whose answers are new weights      |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from paceline.compression import Compression
from paceline.errors import NonFiniteError, PacelineError
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.weights import Weights
from paceline.optim.backward import BackwardWatch
from paceline.optim.buffers import Buffers
from paceline.optim.codec_states import codec_entry, set_residuals
from paceline.optim.exchange import Exchange
from paceline.optim.finite import WAY_OUT, is_finite, listed, sums_up
from paceline.optim.names import NamedParameter
from paceline.optim.samples import SampleCounter
from paceline.optim.watch import ModelWatch
from paceline.updaters import Options
from paceline.updaters.spec import plain
from paceline.worker.traffic import Push

Named: TypeAlias = Sequence[NamedParameter]
Closure: TypeAlias = Callable[[], Any]
Update = Literal["worker", "server"]
OnNan = Literal["error", "skip", "pass"]


@dataclass(frozen=True)
class MergeChoices:
    """Options of how gradients are merged and applied."""

    reduction: Literal["mean", "sum"] = "mean"
    passes: int = 1
    """Backward passes per push."""
    overlap: bool | None = None
    """Push while backward runs; None: the default of the store's mode."""
    lazy: bool = False
    """``step`` does not wait for new weights."""
    clip_norm: float | None = None
    clip_value: float | None = None
    on_nan: OnNan = "error"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: an option is wrong; the text names it and its allowed values.
        """
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is 'mean' or 'sum', not {self.reduction!r}")
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step is {self.passes}; it must be at least 1")
        if self.on_nan not in get_args(OnNan):
            raise ValueError(f"on_nan is 'error', 'skip' or 'pass', not {self.on_nan!r}")
        for name, limit in (("clip_grad_norm", self.clip_norm), ("clip_grad_value", self.clip_value)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} is {limit}; it must be more than 0")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("clip_grad_norm and clip_grad_value exclude each other; give one of them")


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


class Strategy:
    """Steps on this process's own gradients. Base of the other strategies.

    Args:
        setup: the optimizer, its parameters and the user's options.
        store: the parameters' store; nothing is pushed to it here.

    Attributes:
        scales_by_itself: ``step`` divides by the scale of a GradScaler; else the scaler does it as with any optimizer.
        buffers: the model's buffers, where workers share them.
        model_watch: the watch of the model, if it is known. Hooks of parameters keep the strategy alive, and so the
            watch, also after a loop has dropped the DistributedOptimizer.
        skipped_steps: steps that were skipped because gradients were not finite.
        weights: to which round the parameters belong.
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
        """Apply the gradients of all workers; returns what the closure returned.

        Args:
            closure: computes the loss. It is merged too, so that all workers decide the same.
            scale: scale of a GradScaler, if the strategy scales by itself; gradients are divided by it.
            found_inf: whether the GradScaler found Inf; then the step is skipped.
        """
        loss = None
        if closure is not None:
            loss = self.inner.step(lambda: self._merged_closure(closure))
        elif self._prepare():
            self.inner.step()
        self.weights.ended()
        return loss

    def _merged_closure(self, closure: Closure) -> Any:
        loss = self._merge_loss(closure())
        if not self._prepare():
            raise NonFiniteError("gradients are not finite; a step with a closure cannot be skipped")
        return loss

    @torch.no_grad()
    def _prepare(self) -> bool:
        """Merge, check and clip the gradients; returns whether the optimizer steps."""
        self._finish()
        bad = self._not_finite() if self.choices.on_nan != "pass" and self._suspicious() else []
        if bad and self.choices.on_nan == "error":
            raise self._blame(bad)
        if bad:
            self.skipped_steps += 1
            return False
        if self.choices.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([param for _, param, _ in self.named], self.choices.clip_norm)
        if self.choices.clip_value is not None:
            torch.nn.utils.clip_grad_value_([param for _, param, _ in self.named], self.choices.clip_value)
        return True

    def _finish(self) -> None:
        """Merge gradients that are not merged yet."""

    def _merge_loss(self, loss: Any) -> Any:
        """Return the loss over the samples of all workers."""
        return loss

    def _not_finite(self) -> list[str]:
        """Return the names of the parameters whose gradient is not finite."""
        return [name for name, param, _ in self.named if param.grad is not None and not is_finite(param.grad)]

    def _suspicious(self) -> bool:
        """Return whether a merged gradient may be NaN or Inf: a cheap check. False is certain, True is not."""
        return any(param.grad is not None and not sums_up(param.grad) for _, param, _ in self.named)

    def _blame(self, names: Sequence[str]) -> NonFiniteError:
        """Return the error about gradients that are not finite."""
        return NonFiniteError(f"the gradient of {listed(names)} is NaN or Inf; {WAY_OUT}")

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients, as with DistributedDataParallel."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait until the weights of the last step have arrived."""

    def broadcast_weights(self) -> None:
        """Set the weights of all workers and servers to rank 0's. Every worker calls it."""

    def refresh_weights(self) -> None:
        """Set this worker's weights to the newest of the servers that it knows."""

    def check_extendable(self) -> None:
        """Raise an error where param groups cannot get or lose parameters."""

    def add(self, named: Named) -> None:
        """Add the parameters of new param groups. Every worker calls it."""
        self.named += named

    def show_states(self) -> None:
        """Put the state into the user's optimizer, where it is somewhere else and was not put there since the step."""

    def take_states(self) -> None:
        """Use the state of the user's optimizer, which was replaced. Every worker calls it."""

    def fetch_states(self) -> dict[str, Any]:
        """Put the state into the user's optimizer; returns further entries of the ``state_dict``."""
        return codec_entry(self.store, {})

    def give_states(self, saved: Mapping[str, Any]) -> None:
        """Load the state from the user's optimizer and from the entries that :meth:`fetch_states` returned."""
        set_residuals(self.store, saved)

    def close(self) -> None:
        """Stop watching backward passes."""


class ExchangingStrategy(Strategy):
    """Gives the gradients of backward passes to an exchange. Base of the strategies for several workers.

    Args:
        setup: the optimizer, its parameters and the user's options.
        store: the parameters' store.
        exchange: of that store.
        weighs: whether the numbers of samples decide how much a push counts.
        buffers: the model's buffers, if workers share them.
    """

    def __init__(
        self, setup: StrategySetup, store: KVStoreBase, exchange: Exchange, weighs: bool, buffers: Buffers | None
    ) -> None:
        super().__init__(setup, store)
        self.buffers, self._samples, self._weighs = buffers, setup.samples, weighs
        self._exchange = exchange
        self._nan: Literal["pass", "skip", "error"] = "pass"
        """What the exchange does with a gradient of this worker that is not finite."""
        self._round = 0
        self._options: list[Options] = []
        """Options of the last round that was opened."""
        self._push: Push | None = None

    def _carried(self) -> Push:
        """Return what the pushes of this round carry. The first call opens the round, before its first push.

        Rank 0 sends the model's buffers then. They are at the servers before the last push of the round, and so before
        any other worker has the answers of the round.
        """
        if self._push is None:
            self._round += 1
            count = self._samples.take(self._has_gradients)
            if self._weighs and self.store.rank == 0 and self.store.num_workers > 1:
                self._samples.say(count.doubt)
            self._options = self._current_options()
            self._push = Push(
                count.samples if self._weighs or count.inputs is None else count.rows,
                count.rows,
                count.inputs if self._weighs else None,
                self._exchange.encoded(self._options),
                round=self._round,
                nan=self._nan,
                after=() if self.buffers is None else self.buffers.publish(),
            )
        return self._push

    def _current_options(self) -> list[Options]:
        """Return the options of all param groups that pushes carry."""
        raise NotImplementedError

    def _has_gradients(self) -> bool:
        return any(param.grad is not None for _, param, _ in self.named)

    def broadcast_weights(self) -> None:
        """Set the weights of all workers and servers to rank 0's. Every worker calls it."""
        self.synchronize()
        with self.weights.changing({name: [param] for name, param, _ in self.named}, rounds=0):
            self._exchange.broadcast_weights()


class MergedUpdate(ExchangingStrategy):
    """Merges gradients at the end of each backward pass, and steps on the merged ones.

        backward: gradient complete ─► exchange ─► push ─► merged ─► answer
        end of backward: push the rest ─► wait for all answers ─► copy merged gradients to ``p.grad``

    After that a loop may use ``p.grad`` as in one process with the joined batch: clip, scale, read norms, run another
    backward pass that adds to it. Merged gradients are the same on all workers, so merging them again with new ones
    gives the sum of both.

    Args:
        setup: the optimizer, its parameters and the user's options.
        store: merges the gradients.
        exchange: of that store, without parameters.
        weighs: whether the numbers of samples decide how much a push counts.
        buffers: the model's buffers, if workers share them.
        hides_nan: the store's codec hides NaN and Inf from other workers.
    """

    def __init__(
        self,
        setup: StrategySetup,
        store: KVStoreBase,
        exchange: Exchange,
        weighs: bool,
        buffers: Buffers | None = None,
        hides_nan: bool = False,
    ) -> None:
        super().__init__(setup, store, exchange, weighs, buffers)
        self._nan = "skip" if hides_nan and self.choices.on_nan != "pass" else "pass"
        self._overlap = self.choices.overlap is not False
        self._adds_up = self.choices.reduction == "sum"
        self._watch = BackwardWatch(self._on_gradient, self._on_end, self._refuse_merged if self._adds_up else None)
        self._passes = 0
        self._syncs = True
        self._is_merged = False
        """True when gradients were merged after the last step, and no gradient was computed since."""
        self._sums: set[torch.nn.Parameter] = set()
        """Parameters whose gradients are sums over workers since the last merge."""
        self.named = []
        self.add(setup.named)

    def add(self, named: Named) -> None:
        """Add parameters. Every worker calls it."""
        super().add(named)
        self._exchange.add(named)
        self._watch.watch(param for _, param, _ in named)

    # ---- backward --------------------------------------------------------------------------------------------------

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        self._samples.touch()
        self._is_merged = False
        if self._overlap and self._syncs and self._passes + 1 >= self.choices.passes:
            with torch.no_grad():
                if self._exchange.fill(param):
                    self._exchange.push(self._carried())

    def _on_end(self) -> None:
        if self._syncs and self._passes + 1 >= self.choices.passes:
            self._merge()
        else:
            self._passes += 1
        self._samples.ended()

    def _finish(self) -> None:
        """Merge gradients that no backward pass merged: set by hand, or accumulated in :meth:`no_sync`."""
        if not self._is_merged:
            self._merge()
        self._is_merged = False

    @torch.no_grad()
    def _merge(self) -> None:
        """Push the rest, wait for all answers, and copy merged gradients to the parameters."""
        self._passes = 0
        if self._adds_up:
            for param in list(self._sums):
                self._refuse_merged(param)
        self._exchange.push_rest(self._carried())
        self._exchange.settle()
        self._push = None
        self._exchange.take()
        self._is_merged = True
        if self._adds_up:
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients; the first backward pass after it, or ``step``, merges them."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    # ---- step ------------------------------------------------------------------------------------------------------

    def _suspicious(self) -> bool:
        return self._exchange.suspicious()

    def _blame(self, names: Sequence[str]) -> NonFiniteError:
        return self._exchange.blame(names, self._round)

    def _merge_loss(self, loss: Any) -> Any:
        """Return the mean of the workers' losses, weighted by samples; with reduction ``sum`` their sum."""
        if self.store.num_workers == 1 or not isinstance(loss, torch.Tensor | float | int):
            return loss
        value = self._exchange.mean_loss(float(loss), self._samples.last)
        return loss.detach().clone().fill_(value) if isinstance(loss, torch.Tensor) else value

    def _current_options(self) -> list[Options]:
        return plain_groups(self.inner)

    def close(self) -> None:
        """Stop watching backward passes."""
        self._watch.close()


def plain_groups(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return the options of every param group that are plain data: numbers, strings, tuples of numbers."""
    found = []
    for group in optimizer.param_groups:
        options: Options = {}
        for name, value in group.items():
            with contextlib.suppress(TypeError, ValueError):
                if name != "params":
                    options[name] = plain(name, value)
        found.append(options)
    return found
