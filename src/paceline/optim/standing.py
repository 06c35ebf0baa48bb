"""Where a DistributedOptimizer stands: what a worker gives to one that joins the job while it trains."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.kvstore.dist import DistStore
from paceline.optim.local_steps import LocalSteps
from paceline.optim.strategy import ExchangingStrategy, Strategy
from paceline.worker.joining import Part

_numbers = itertools.count()


class Standing:
    """Gives and takes the state of one optimizer.

    Where workers step, it has the weights and the optimizer's state; elsewhere servers have these.

    Raises:
        PacelineError: this worker joins, and the optimizer makes local steps.
    """

    def __init__(self, merging: Strategy, model: torch.nn.Module | None) -> None:
        self._merging, self._model = merging, model
        name, store = f"optimizer {next(_numbers)}", merging.store
        if not isinstance(store, DistStore):
            return
        joining = store.session.joining
        if joining.is_on and isinstance(merging, LocalSteps):
            raise PacelineError(
                f"worker {store.rank} cannot join this job again: its workers make local steps, which nobody can join yet; "
                "restart the job from a checkpoint (--max-restarts)"
            )
        joining.add(name, Part(self.give, self.take))

    def give(self) -> Any:
        """Return the state."""
        merging = self._merging
        merging.synchronize()
        state: dict[str, Any] = {"round": merging.weights.round, "skipped": merging.skipped_steps}
        if isinstance(merging, ExchangingStrategy):
            state["counts"] = merging.counts()
        if merging.steps_here:
            state["params"] = {name: param.detach() for name, param, _ in merging.named}
            state["optimizer"] = merging.inner.state_dict()
        if self._model is not None:
            ours = {id(param) for _, param, _ in merging.named}
            rest = {name: one for name, one in self._model.named_parameters() if id(one) not in ours}
            state["frozen"] = {name: one.detach() for name, one in rest.items()}
        return state

    def take(self, state: Any) -> None:
        """Take the state; None: the servers have all of it."""
        merging, state = self._merging, state or {}
        with torch.no_grad():
            if merging.steps_here and "params" in state:
                with merging.weights.changing({name: [param] for name, param, _ in merging.named}, rounds=0):
                    for name, param, _ in merging.named:
                        param.copy_(state["params"][name])
                merging.inner.load_state_dict(state["optimizer"])
            else:
                merging.refresh_weights()
            for name, param in self._model.named_parameters() if self._model is not None else ():
                if name in state.get("frozen", {}):
                    param.copy_(state["frozen"][name])
        merging.weights.round, merging.skipped_steps = state.get("round", 0), state.get("skipped", 0)
        if isinstance(merging, ExchangingStrategy) and "counts" in state:
            merging.stand(state["counts"])
