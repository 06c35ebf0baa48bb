"""Where a DistributedOptimizer stands: what a worker gives to one that joins the job while it trains."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
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
        if joining.is_on and (isinstance(merging, LocalSteps) or merging.choices.passes > 1):
            raise PacelineError(
                f"worker {store.rank} cannot take over from the process that has died: workers make local steps, or "
                "several backward passes per step, and nobody can join in the middle of these; restart the job from a "
                "checkpoint (--max-restarts)"
            )
        joining.add(name, Part(self.give, self.take))

    def give(self) -> Any:
        """Return the state."""
        merging = self._merging
        state: dict[str, Any] = {"round": merging.weights.round, "skipped": merging.skipped_steps}
        if isinstance(merging, ExchangingStrategy):
            state["counts"] = merging.counts()
        if merging.steps_here:
            state["params"] = {name: param.detach() for name, param, _ in merging.named}
            state["optimizer"] = merging.inner.state_dict()
        state["groups"] = [_options(group) for group in merging.inner.param_groups]
        state["rest"] = self._rest()
        return state

    def take(self, state: Any) -> None:
        """Take the state; None: the servers have all of it."""
        merging, state = self._merging, state or {}
        with torch.no_grad():
            self._take_weights(state)
            for name, one in self._rest().items():
                if name in state.get("rest", {}):
                    one.copy_(state["rest"][name])
        for group, options in zip(merging.inner.param_groups, state.get("groups", ()), strict=False):
            group.update(options)
        merging.weights.round, merging.skipped_steps = state.get("round", 0), state.get("skipped", 0)
        if isinstance(merging, ExchangingStrategy) and "counts" in state:
            merging.stand(state["counts"])

    def _take_weights(self, state: Any) -> None:
        merging = self._merging
        if not (merging.steps_here and "params" in state):
            merging.refresh_weights()
            return
        with merging.weights.changing({name: [param] for name, param, _ in merging.named}, rounds=0):
            for name, param, _ in merging.named:
                param.copy_(state["params"][name])
        merging.inner.load_state_dict(state["optimizer"])

    def _rest(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers, and its parameters that this optimizer does not have."""
        if self._model is None:
            return {}
        ours = {id(param) for _, param, _ in self._merging.named}
        every = itertools.chain(self._model.named_parameters(), self._model.named_buffers())
        return {name: one.detach() for name, one in every if id(one) not in ours}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group, such as its learning rate of this moment."""
    plain = (bool, int, float, str, tuple, torch.Tensor)
    return {name: one for name, one in group.items() if name != "params" and isinstance(one, plain)}
