"""Updates by an optimizer in the store: trainers push gradients and pull new values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from paceline.errors import PacelineError
from paceline.kvstore.base import KVStore
from paceline.kvstore.device_sums import sum_of
from paceline.kvstore.dist import DistStore
from paceline.kvstore.inprocess import InProcessStore
from paceline.layout.keys import Key
from paceline.mx.gluon.clip import GradientClip
from paceline.mx.gluon.gradients import States, broadcast, collect, densify
from paceline.mx.gluon.held_values import HeldValues
from paceline.mx.gluon.optimizer_plan import OptimizerPlan
from paceline.mx.gluon.parameter import Parameter
from paceline.optim.binding import same_bits
from paceline.updaters import KeyOptions, Options
from paceline.updaters.gradient import clip_of
from paceline.updaters.rows import LAZY

_ON_DEVICES = "make the Trainer with update_on_kvstore=False"


class StoreUpdates:
    """Lets any store that supports an optimizer update the values."""

    on_store = True

    def __init__(self, plan: OptimizerPlan, store: KVStore) -> None:
        self._plan, self._store = plan, store
        self._sent: tuple[list[Options], dict[Key, KeyOptions]] | None = None
        self._held = HeldValues()

    def start(self, everything: Mapping[str, Parameter], trained: Mapping[str, Parameter]) -> None:
        """Send the optimizer and the initial values to the store."""
        keys, precision = self._plan.key_options(), self._plan.multi_precision
        self._store.set_optimizer(self._plan.optimizer, keys=keys, multi_precision=precision, **self._plan.options)
        broadcast(self._store, everything, by_rows=True)
        self._held.note(everything)

    def step(self, trained: Mapping[str, Parameter], scale: float, step: int, samples: float) -> None:
        """Push all gradients and pull all values.

        Raises:
            PacelineError: a value was changed where the store does not see it.
        """
        self._check_unchanged(trained)
        self._held.forget(trained)  # where the step fails, nobody knows what is in the store
        options = self._options(step), self._plan.key_options()
        if options != self._sent:
            self._store.set_options(*options)
            self._sent = options
        self._store.samples = samples
        self._exchange(trained, scale)
        self._held.note(trained)

    def _check_unchanged(self, trained: Mapping[str, Parameter]) -> None:
        changed = next((key for key in self._held.changed(trained) if not self._is_stored(key, trained[key])), None)
        if changed is not None:
            raise PacelineError(
                f"parameter {changed!r} was changed after the last step, where the {self._store.type} store does not "
                f"see it, which holds the values. After such a change {self._way_out}"
            )

    def _is_stored(self, key: str, parameter: Parameter) -> bool:
        """Return whether the store is known to hold a parameter's value."""
        return False

    @property
    def _way_out(self) -> str:
        return f"make a new Trainer, or {_ON_DEVICES}"

    def _options(self, step: int) -> list[Options]:
        return self._plan.groups_at(step)

    def _exchange(self, trained: Mapping[str, Parameter], scale: float) -> None:
        self._push_and_pull(trained, self._scaled(trained, scale))

    def _scaled(self, trained: Mapping[str, Parameter], scale: float) -> dict[str, list[torch.Tensor]]:
        """Return gradients times ``scale``: scaled in place if the step clears them, else copies."""
        densify({key: one for key, one in trained.items() if not one.is_row_sparse})
        grads = collect(trained, everywhere=self._store.num_workers > 1)
        return {
            key: [one.mul_(scale) if trained[key].grad_req == "write" else one * scale for one in devices]
            for key, devices in grads.items()
        }

    def _push_and_pull(self, trained: Mapping[str, Parameter], grads: Mapping[str, Sequence[torch.Tensor]]) -> None:
        if grads:
            self._store.pushpull(list(grads), list(grads.values()), out=[trained[key].list_data() for key in grads])

    def assign(self, key: str, value: torch.Tensor) -> None:
        """Raise an error: a stored value cannot be set.

        Raises:
            PacelineError: always; stores of one process override this.
        """
        raise PacelineError(
            f"parameter {key!r} cannot be set: a {self._store.type} store holds it for all workers. Set it before "
            "the Trainer is made, or make it with update_on_kvstore=False and set it on every worker"
        )

    def take(self, everything: Mapping[str, Parameter]) -> None:
        """Raise an error: values in the store cannot be set.

        Raises:
            PacelineError: always; paceline's own stores override this.
        """
        raise PacelineError(f"values in a {self._store.type} store cannot be set; set them before the Trainer is made")

    def states(self) -> States:
        """Return the optimizer's state by key."""
        return self._store.optimizer_states()

    def set_states(self, states: States) -> None:
        """Set the optimizer's state. Every worker calls it; rank 0's state is used."""
        if self._store.rank == 0:
            self._store.set_optimizer_states(states)
        self._store.barrier()

    def check(self, states: States, where: str) -> None:
        """Do nothing: a store checks the states that it gets."""


class InProcessUpdates(StoreUpdates):
    """Lets a store of this process update the values."""

    def __init__(self, plan: OptimizerPlan, store: InProcessStore, clip: GradientClip) -> None:
        super().__init__(plan, store)
        self._values = store
        if clip:
            store.clip = clip

    def _exchange(self, trained: Mapping[str, Parameter], scale: float) -> None:
        self._values.scale = scale
        try:
            self._push_and_pull(trained, collect(trained, everywhere=False))
        finally:
            self._values.scale = 1.0

    def _push_and_pull(self, trained: Mapping[str, Parameter], grads: Mapping[str, Sequence[torch.Tensor]]) -> None:
        by_rows = {key: one for key, one in grads.items() if self._changes_rows(trained[key], one)}
        if not by_rows:
            super()._push_and_pull(trained, grads)
            return
        self._store.push(list(grads), list(grads.values()))
        if dense := [key for key in grads if key not in by_rows]:
            self._store.pull(dense, [trained[key].list_data() for key in dense])
        for key, one in by_rows.items():
            touched = torch.cat([grad._indices()[0].cpu() for grad in one])
            self._store.row_sparse_pull(key, trained[key].list_data(), row_ids=touched)

    def _changes_rows(self, parameter: Parameter, grads: Sequence[torch.Tensor]) -> bool:
        """Return whether only the pushed rows change. Then only they are pulled."""
        return self._plan.cls in LAZY and parameter.is_row_sparse and all(one.is_sparse for one in grads)

    def assign(self, key: str, value: torch.Tensor) -> None:
        """Set a stored value."""
        self._values.assign(key, value)
        self._held.forget([key])

    def take(self, everything: Mapping[str, Parameter]) -> None:
        """Put the values of all parameters into the store."""
        for key, one in everything.items():
            self._values.assign(key, one.data())
        self._held.note(everything)

    def _is_stored(self, key: str, parameter: Parameter) -> bool:
        stored = [torch.empty_like(one) for one in parameter.list_data()]
        self._values.pull(key, stored)
        return all(same_bits(*pair) for pair in zip(parameter.list_data(), stored, strict=True))

    @property
    def _way_out(self) -> str:
        return "call trainer.take_weights(), or set values with net.load_state_dict or set_data of the parameter"


class ServerUpdates(StoreUpdates):
    """Lets the servers of a distributed store update the values."""

    def __init__(self, plan: OptimizerPlan, store: DistStore, clip: GradientClip) -> None:
        super().__init__(plan, store)
        self._servers, self._clip = store, clip
        self._clip_rounds = clip.norm is not None and store.policy.merges_rounds

    def _options(self, step: int) -> list[Options]:
        """Return the options per param group; if servers clamp elements, with the bound."""
        groups, value = self._plan.groups_at(step), self._clip.value
        if value is None or self._clip.norm is not None:
            return groups
        return [group | {"clip_gradient": min(value, clip_of(group) or math.inf)} for group in groups]

    def _push_and_pull(self, trained: Mapping[str, Parameter], grads: Mapping[str, Sequence[torch.Tensor]]) -> None:
        if self._clip_rounds and grads:
            self._servers.push(list(grads), list(grads.values()))
            self._servers.clip_round()
            self._servers.pull(list(grads), [trained[key].list_data() for key in grads], ignore_sparse=False)
            return
        if self._clip.norm is not None and grads:  # servers do not merge: this worker clips its sums over its devices
            sums = {key: sum_of(devices) for key, devices in grads.items()}
            factor = self._clip(list(sums.values()), 1.0)
            grads = {key: [one.mul_(factor)] for key, one in sums.items()}
        super()._push_and_pull(trained, grads)

    def take(self, everything: Mapping[str, Parameter]) -> None:
        """Set the values of all parameters on the servers. Every worker calls it; rank 0's values are used."""
        self._servers.barrier()
        if self._servers.session.is_lead:
            self._servers.set_values(list(everything), [one.data() for one in everything.values()])
        self._servers.barrier()
        self._servers.pull(list(everything), [one.list_data() for one in everything.values()])
        self._held.note(everything)

    def set_states(self, states: States) -> None:
        """Set the optimizer's state on the servers. Every worker calls it; rank 0's state is used."""
        self._servers.replace_optimizer_states(states)

    @property
    def _way_out(self) -> str:
        ours = "call trainer.take_weights() on every worker, which takes rank 0's values"
        return f"{ours}, or {_ON_DEVICES}" if self._servers.policy.merge == "all" else ours
