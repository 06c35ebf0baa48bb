"""Strategies of DistributedOptimizer: each is one way to update with the gradients of all workers.

| strategy              | the optimizer runs                    | gradients go through                           |
|-----------------------|---------------------------------------|------------------------------------------------|
| :class:`Strategy`     | in this process, on its own gradients | nothing                                        |
| :class:`MergedUpdate` | in every worker, on merged gradients  | an exchange whose answers are merged gradients |
| ``ServerUpdate``      | on the servers                        | an exchange whose answers are new weights      |
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from paceline.compression import Compression
from paceline.errors import NonFiniteError
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.weights import Weights
from paceline.layout.tensors import without_graph
from paceline.optim.backward import KeptGradients, is_watched
from paceline.optim.binding import is_finite
from paceline.optim.buffers import Buffers
from paceline.optim.exchange import Exchange
from paceline.optim.names import NamedParameter
from paceline.optim.samples import SampleCounter
from paceline.optim.shared_tensors import untrained_of
from paceline.optim.told import ToldBatches
from paceline.optim.watch import ModelWatch
from paceline.updaters import Options
from paceline.worker.traffic import Carried
from paceline.worker.weight_sums import is_due

Named: TypeAlias = Sequence[NamedParameter]
Closure: TypeAlias = Callable[[], Any]
Update = Literal["worker", "server"]
OnNan = Literal["error", "skip", "pass"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeChoices:
    """Options of how gradients are merged and applied."""

    reduction: Literal["mean", "sum"] = "mean"
    passes: int = 1
    """Backward passes per push."""
    overlap: bool = True
    """Push while backward runs, where workers step."""
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
        if self.passes < 1 or self.passes != int(self.passes):
            raise ValueError(f"backward_passes_per_step is {self.passes}; it must be an integer, at least 1")
        if self.on_nan not in get_args(OnNan):
            raise ValueError(f"on_nan is 'error', 'skip' or 'pass', not {self.on_nan!r}")
        for name, limit in (("clip_grad_norm", self.clip_norm), ("clip_grad_value", self.clip_value)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} is {limit}; it must be more than 0")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("clip_grad_norm and clip_grad_value exclude each other; give one of them")


@dataclass(frozen=True)
class StrategySetup:
    """Arguments of a strategy, except its store."""

    inner: torch.optim.Optimizer
    """The user's optimizer."""
    named: Named
    """Its parameters."""
    choices: MergeChoices
    model: torch.nn.Module | None
    """The network, if it is known."""
    samples: SampleCounter
    compression: Compression | None
    """Settings of codecs; None or empty: no compression."""


class Strategy:
    """Steps on this process's own gradients. Base of the other strategies.

    Attributes:
        steps_here: the wrapped optimizer steps, in this process, and a GradScaler divides by its scale as with any
            other; else ``step`` of the strategy divides.
        buffers: the model's buffers, where workers share them.
        model_watch: the watch of the model, if it is known. Hooks of parameters keep the strategy alive, and so the
            watch, also after a loop has dropped the DistributedOptimizer.
        skipped_steps: steps that were skipped because gradients were not finite.
        weights: to which round the parameters belong.
    """

    steps_here = True

    def __init__(self, setup: StrategySetup, store: KVStoreBase, exchange: Exchange | None = None) -> None:
        self._exchange, self._round = exchange or Exchange(), 0
        self.inner, self.named, self.choices = setup.inner, list(setup.named), setup.choices
        self.store = store
        self.buffers: Buffers | None = None
        self.model_watch: ModelWatch | None = None
        self.skipped_steps = 0
        self.weights = Weights.of(store)

    def step(
        self, closure: Closure | None, scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None
    ) -> Any:
        """Apply the gradients of all workers; returns the closure's result.

        Args:
            closure: computes the loss. It is merged too, so that all workers decide the same.
            scale: scale of a GradScaler, unless ``steps_here``; gradients are divided by it.
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
            raise NonFiniteError(
                "gradients are NaN or Inf, and on_nan='skip' cannot skip a step with a closure: call backward and step "
                "without one, lower the learning rate, or set on_nan='pass'"
            )
        return loss

    @without_graph
    def _prepare(self) -> bool:
        """Merge, check and clip the gradients; returns whether the optimizer steps."""
        self._finish()
        bad = self._not_finite() if self.choices.on_nan != "pass" and self._exchange.suspicious() else []
        if bad and self.choices.on_nan == "error":
            raise self._exchange.blame(bad, self._round)
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

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients, as with DistributedDataParallel."""
        return contextlib.nullcontext()

    def zeroed(self) -> None:
        """Note that all gradients were set to None or to zeros."""

    def broadcast_weights(self) -> None:
        """Set the weights of all workers and servers to rank 0's. Every worker calls it."""

    def refresh_weights(self) -> None:
        """Set this worker's weights to the newest of the servers that it knows."""

    def ended_step(self) -> None:
        """Note that a step has ended, as on all workers."""

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
    """Gives the gradients of backward passes to an exchange. Base of the strategies for several workers."""

    def __init__(self, setup: StrategySetup, store: KVStoreBase, exchange: Exchange, buffers: Buffers | None) -> None:
        super().__init__(setup, store, exchange)
        self.buffers, self._samples = buffers, setup.samples
        self._says_graph = store.rank == 0 and store.num_workers > 1
        self._nan: Literal["pass", "skip", "error"] = "pass"
        """The exchange's reaction to a gradient of this worker that is not finite."""
        self._steps, self._has_said = 0, False
        self._model = setup.model
        self._options: list[Options] = []
        """Options of the last round that was opened."""
        self._open: Carried | None = None
        """The data that the open round's pushes carry; None: no round is open."""
        self._unpushed: KeptGradients | None = None
        """The gradients after the last pass, if no push has any of them yet."""
        self._told = ToldBatches(setup.samples, exchange.merge, store.rank) if store.num_workers > 1 else None
        if exchange.merge == "mean" and store.num_workers > 1:
            setup.samples.read_losses(store.rank)

    def _touch(self, param: torch.nn.Parameter) -> None:
        """Note that the running pass has made a gradient; its first one tells if those of earlier passes are gone."""
        if self._unpushed is not None and not self._samples.is_reaching and self._unpushed.are_dropped(param):
            self.zeroed()
        self._samples.touch()

    def _keep(self) -> None:
        """Note the gradients of a pass that no push has."""
        self._unpushed = KeptGradients(param for _, param, _ in self.named)

    def _carried(self) -> Carried:
        """Return the data that this round's pushes carry. The first call opens the round, before its first push.

        Rank 0 sends the model's buffers then. They are at the servers before the last push of the round, and so before
        any other worker has the answers of the round.
        """
        if self._open is None:
            self._round += 1
            count = self._samples.take(self._has_gradients, self._repeats)
            self._options = self._current_options()
            self._open = Carried(
                count.samples if self._exchange.merge == "mean" else count.rows,
                count.rows,
                self._exchange.encoded(self._options),
                round=self._round,
                nan=self._nan,
                after=None if self.buffers is None else self.buffers.publish(),
            )
        return self._open

    def _say_changed(self, why: str, way_out: str) -> None:
        """Say once that a loop has changed its own gradients, before they are merged."""
        if not self._has_said and self.store.num_workers > 1:
            self._has_said = True
            logger.warning(
                "worker %d: gradients were changed before they were merged: %s. What looks at the size of gradients "
                "(clipping, a GradScaler) has seen this worker's own. %s, or clip with clip_grad_norm= or "
                "clip_grad_value=",
                self.store.rank, why, way_out,
            )  # fmt: skip

    def _push_rest(self, carried: Carried) -> None:
        """Push what is not pushed yet of the round."""
        if self._says_graph:
            self._say_graph()
        self._exchange.push_rest(carried)
        if self.buffers is not None:
            self.buffers.pushed()

    def _say_graph(self) -> None:
        """Say once whose samples a derivative of gradients is of: exchanges keep their graph, and merge only them."""
        grad = next((param.grad for _, param, _ in self.named if param.grad is not None), None)
        if grad is not None and grad.grad_fn is not None:
            self._says_graph = False
            logger.warning(
                "gradients have a graph (create_graph=True): a derivative of param.grad, as AdaHessian takes it, is of "
                "each worker's own samples. If a step uses it, average it over the workers before: pushpull of a "
                'store of its own, paceline.kvstore.create("dist_sync", mean=True), does that'
            )

    def _settle(self) -> None:
        """Wait for all answers of the round, and end it."""
        self._exchange.settle()
        if self.buffers is not None:
            self.buffers.settled()

    def _repeats(self) -> bool:
        """Return whether the gradients are this worker's own of the last push, as where a loop steps on them twice."""
        return False

    def _push(self) -> None:
        """Push complete gradients while backward runs, once the samples of the round are counted."""
        if self._open is not None or not self._samples.may_rise:
            self._exchange.push(self._open or self._carried())

    def ended_step(self) -> None:
        """After some of the steps, let the workers' weights and batches be compared."""
        self._steps += 1
        is_compared = is_due(self._steps)
        batch = None if self._told is None else self._told.of_step(self._steps)
        if is_compared or batch is not None:
            with torch.no_grad():
                self._exchange.tell_step(self._steps, self._own_weights() if is_compared else {}, batch)

    def counts(self) -> dict[str, Any]:
        """Return how far this worker has counted: as far as all others in lock step."""
        buffers = None if self.buffers is None else self.buffers.counts()
        return {"round": self._round, "steps": self._steps, "buffers": buffers}

    def stand(self, counts: Mapping[str, Any]) -> None:
        """Be where the others are, as :meth:`counts` of one of them says."""
        self._round, self._steps = counts["round"], counts["steps"]
        if self.buffers is not None:
            self.buffers.stand(counts["buffers"])

    def _own_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that may become others than those of other workers: no exchange brings them together.

        Without the parameters of other optimizers, which may not be in lock step.
        """
        if self._model is None:
            return {}
        rest = untrained_of(self._model, (param for _, param, _ in self.named))
        return {name: one.data for name, one in rest.items() if not is_watched(one)}

    def _current_options(self) -> list[Options]:
        """Return the options of all param groups that pushes carry."""
        raise NotImplementedError

    def _has_gradients(self) -> bool:
        return any(param.grad is not None for _, param, _ in self.named)

    def broadcast_weights(self) -> None:
        """Set the weights of all workers and servers to rank 0's. Every worker calls it."""
        with self.weights.changing({name: [param] for name, param, _ in self.named}, rounds=0):
            self._exchange.broadcast_weights()


# ---- states of codecs in a state_dict -----------------------------------------------------------------------------

#: Entry of a ``state_dict`` with the states of codecs.
_ENTRY = "codec_states"


def codec_entry(store: KVStoreBase, unsent: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the entry, with the residuals of this worker's pulls by key; empty when codecs keep no state."""
    if not (store.keeps_residuals or unsent):
        return {}
    return {_ENTRY: {"rank": store.rank, "pushes": store.codec_states(), "unsent": unsent}}


def set_residuals(store: KVStoreBase, saved: Mapping[str, Any]) -> None:
    """Set the residuals of this worker's pushes from a ``state_dict``; if they are another worker's, they become 0."""
    entry = saved.get(_ENTRY, {})
    if store.keeps_residuals:
        store.set_codec_states(entry["pushes"] if entry.get("rank") == store.rank else {})


def unsent_in(saved: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return the residuals of pulls, by key."""
    return saved.get(_ENTRY, {}).get("unsent", {})  # type: ignore[no-any-return]
