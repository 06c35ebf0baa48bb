"""Strategy of ``update="worker"``: the optimizer runs in the worker, on merged gradients.

    backward: gradient complete ─► arena ─► bucket complete ─► push ─► merged ─► answer
    end of backward: push the rest ─► wait for all answers ─► copy merged gradients to ``p.grad``

After that a loop may use ``p.grad`` as in one process with the joined batch: clip, scale, read norms, run another
backward pass that adds to it. Merged gradients are the same on all workers, so merging them again with new ones gives
the sum of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import NonFiniteError
from paceline.kvstore.dist import DistStore
from paceline.optim.binding import Bound, bind_keys, take_all
from paceline.optim.buffers import Buffers
from paceline.optim.exchange import Exchange
from paceline.optim.finite import WAY_OUT, is_finite, listed, sums_up
from paceline.optim.local_update import MergingUpdate
from paceline.optim.round import Round
from paceline.optim.sparse import SparseExchange, find_sparse
from paceline.optim.strategy import Named, StrategySetup
from paceline.updaters import Options, UpdaterSpec
from paceline.updaters.updater_spec import plain

#: Only reentrant checkpointing computes a gradient twice in one backward pass.
_AGAIN = (
    "One backward pass computes it twice: give torch.utils.checkpoint use_reentrant=False, or DistributedOptimizer "
    "overlap=False"
)


class WorkerUpdate(MergingUpdate):
    """Merges through the servers of a ``dist_sync`` store.

    Args:
        setup: the optimizer, its parameters and the user's options.
        store: merges to the mean over samples, or to the sum.
        buffers: the model's buffers, if workers share them.
    """

    store: DistStore

    def __init__(self, setup: StrategySetup, store: DistStore, buffers: Buffers | None) -> None:
        super().__init__(dataclasses.replace(setup, named=[]), store)
        self._model = setup.model
        self.buffers = buffers
        # The servers compare the options between workers.
        self._round = Round(store, setup.samples, buffers, lambda: plain_groups(self.inner), self.has_gradients)
        self._exchange = Exchange(store, self._round.open, self._before_push, _AGAIN)
        self._overlap = self.choices.overlap is not False
        self._suspect = False
        self._loss_store: DistStore | None = None
        store.set_spec(UpdaterSpec())
        self._sparse = SparseExchange(store, [], "worker")
        self.add(setup.named)

    def add(self, named: Named) -> None:
        """Initialise keys for parameters, with rank 0's weights. Every worker calls it."""
        super().add(named)
        sparse = find_sparse([(name, param) for name, param, _ in named], self.inner, self._model)
        self._sparse.add(sparse)
        dense = [(name, param) for name, param, _ in named if param not in self._sparse]
        if dense:
            self._add_dense([name for name, _ in dense], [param for _, param in dense])

    def _add_dense(self, names: list[str], params: list[torch.nn.Parameter]) -> None:
        # Frozen parameters get buckets of their own, which may stay unpushed for a long time.
        tags = [int(not param.requires_grad) for param in params]
        self._exchange.add(bind_keys(self.store, names, params, tags))
        self._by_param = {one.param: one for one in self._exchange.bound}

    def complete(self, param: torch.nn.Parameter) -> None:
        """Copy a gradient into the arena, and push its bucket if that is complete."""
        if self._overlap and param not in self._sparse:
            self._exchange.fill(self._by_param[param])

    def merge(self) -> None:
        """Push the rest, wait for all answers, and copy merged gradients to the parameters."""
        self._exchange.push_rest()
        self._round.open()
        self._sparse.push()
        self._exchange.settle()
        self._sparse.finish()
        self._round.close()
        self._suspect = self.choices.on_nan != "pass" and not self._all_sum_up()
        take_all((one for one in self._exchange.bound if not one.missing), weights=False)

    def _all_sum_up(self) -> bool:
        return all(sums_up(block.values) for block in self._exchange.blocks) and self._sparse.all_sum_up()

    def _before_push(self, members: Sequence[Bound]) -> bool:
        """Return whether to skip the update: a gradient is not finite, and a codec would hide that from others."""
        encoded = "push" in self.store.traffic.codecs and self.choices.on_nan != "pass"
        return encoded and self.store.samples != 0 and not all(sums_up(one.grad) for one in members)

    def suspicious(self) -> bool:
        """Return whether the last merged gradients may be NaN or Inf."""
        return self._suspect

    def blame(self, names: Sequence[str]) -> NonFiniteError:
        """Return the error about gradients that are not finite. Collective: all workers find them in the same step."""
        own = [one.name for one in self._exchange.bound if not one.absent and not is_finite(one.grad)]
        own += self._sparse.not_finite()
        found = self.store.session.gather(f"{self.store.name}/not finite", "\n".join(own[:100]).encode())
        guilty = {rank: text.decode().split("\n") for rank, text in enumerate(found) if text}
        whose = "; ".join(f"worker {rank} pushed that of {listed(theirs)}" for rank, theirs in guilty.items())
        return NonFiniteError(
            f"worker {self.store.rank}: the merged gradient of {listed(names)} is NaN or Inf in round "
            f"{self._round.number}: "
            f"{whose or 'the sum of finite gradients is too large'}; {WAY_OUT}"
        )

    def merge_loss(self, loss: Any) -> Any:
        """Return the mean of the workers' losses, weighted by samples; with reduction ``sum`` their sum."""
        if self.store.num_workers == 1 or not isinstance(loss, torch.Tensor | float | int):
            return loss
        value = torch.tensor([float(loss)], dtype=torch.float64)
        if self._loss_store is None:
            self._loss_store = self.store.sibling("loss", self.choices.reduction == "mean")
            self._loss_store.init("loss", torch.zeros_like(value))
        self._loss_store.samples = self._samples.last
        self._loss_store.pushpull("loss", value)
        return loss.detach().clone().fill_(value[0]) if isinstance(loss, torch.Tensor) else float(value)

    def broadcast_weights(self) -> None:
        """Set the weights of all workers to rank 0's. Every worker calls it."""
        with self.weights.changing({name: [param] for name, param, _ in self.named}, rounds=0):
            self._exchange.broadcast_weights()
            self._sparse.broadcast_weights()


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
