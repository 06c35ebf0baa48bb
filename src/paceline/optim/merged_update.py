"""Strategy of ``update="worker"``, of all-reduce and of one process with a codec: workers step on merged gradients.

    backward: gradient complete ─► exchange ─► push ─► merged ─► answer
    end of backward: push the rest ─► wait for all answers ─► copy merged gradients to ``p.grad``

After that a loop may use ``p.grad`` as in one process with the joined batch: clip, scale, read norms, run another
backward pass that adds to it. Merged gradients are the same on all workers, so merging them again with new ones gives
the sum of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.kvstore.base import KVStoreBase
from paceline.optim.backward import BackwardWatch
from paceline.optim.buffers import Buffers
from paceline.optim.exchange import Exchange
from paceline.optim.strategy import ExchangingStrategy, Named, StrategySetup
from paceline.updaters import Options, option_groups


class MergedUpdate(ExchangingStrategy):
    """Merges gradients at the end of each backward pass, and steps on the merged ones.

    The exchange has no parameters yet. ``hides_nan``: the store's codec hides NaN and Inf from other workers.
    """

    def __init__(
        self,
        setup: StrategySetup,
        store: KVStoreBase,
        exchange: Exchange,
        buffers: Buffers | None = None,
        hides_nan: bool = False,
    ) -> None:
        super().__init__(setup, store, exchange, buffers)
        self._nan = "skip" if hides_nan and self.choices.on_nan != "pass" else "pass"
        self._overlap = self.choices.overlap
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
        self._touch(param)
        self._is_merged = False
        if not (self._overlap and self._syncs and self._watch.is_last(param)):
            return
        if self._passes + 1 >= self.choices.passes and self._exchange.fill(param):
            self._push()

    def _on_end(self) -> None:
        if self._syncs and self._passes + 1 >= self.choices.passes:
            self._merge()
        else:
            self._passes += 1
            self._keep()
        self._samples.ended()

    def _finish(self) -> None:
        """Merge gradients that no backward pass merged: set by hand, or accumulated in :meth:`no_sync`."""
        if not self._is_merged:
            if self._unpushed is not None and not self._has_gradients():
                self.zeroed()
            elif self._unpushed is not None and not self._unpushed.are_unchanged():
                self._say_changed(
                    "this step has fewer backward passes than backward_passes_per_step, or all of them in no_sync",
                    "Let each step end with a backward pass that merges",
                )
            self._merge()
        self._is_merged = False

    def _merge(self) -> None:
        """Push the rest, wait for all answers, and copy merged gradients to the parameters."""
        self._passes, self._unpushed = 0, None
        if self._adds_up:
            self._refuse_shared()
            for param in list(self._sums):
                self._refuse_merged(param)
        self._push_rest(self._open or self._carried())
        self._settle()
        self._open = None
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
                "reduction='sum' call optimizer.zero_grad() before the next backward, set backward_passes_per_step, or "
                "use no_sync"
            )
        self._sums.discard(param)

    def _refuse_shared(self) -> None:
        """Raise when another optimizer sums the gradient of a parameter, too."""
        shared = next((name for name, param, _ in self.named if not self._watch.watches(param)), None)
        if shared is not None:
            raise PacelineError(
                f"worker {self.store.rank}: parameter {shared!r} has a later DistributedOptimizer, too, so that its "
                "gradient would be summed twice over the workers: with reduction='sum' give each parameter to one "
                "DistributedOptimizer, or use means"
            )

    def zeroed(self) -> None:
        """Note that gradients at the next merge are those of later passes: this worker's own, and no sums."""
        self._sums.clear()
        self._passes, self._unpushed = 0, None
        self._samples.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients; the first backward pass after it, or ``step``, merges them."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    # ---- step ------------------------------------------------------------------------------------------------------

    def _own_weights(self) -> dict[str, torch.Tensor]:
        return {name: param.data for name, param, _ in self.named} | super()._own_weights()

    def _merge_loss(self, loss: Any) -> Any:
        """Return the mean of the workers' losses, weighted by samples; with reduction ``sum`` their sum."""
        if self.store.num_workers == 1 or not isinstance(loss, torch.Tensor | float | int):
            return loss
        own = loss.item() if isinstance(loss, torch.Tensor) else loss
        value = self._exchange.mean_loss(own, 1.0 if (last := self._samples.last) is None else last.samples)
        return loss.detach().clone().fill_(value) if isinstance(loss, torch.Tensor) else value

    def _current_options(self) -> list[Options]:
        return option_groups(self.inner, skips=True)

    def close(self) -> None:
        """Stop watching backward passes."""
        self._watch.close()
