"""Updates by an optimizer on every device, from the same summed gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from paceline.errors import PacelineError
from paceline.kvstore.allreduce import AllReduceStore
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.layout.keys import Key
from paceline.mx.context import Context
from paceline.mx.gluon.clip import GradientClip
from paceline.mx.gluon.gradients import States, broadcast, collect, densify
from paceline.mx.gluon.held_values import AlikeValues
from paceline.mx.gluon.optimizer_plan import OptimizerPlan
from paceline.mx.gluon.parameter import Parameter
from paceline.naming import listed
from paceline.updaters import KeyedOptimizer
from paceline.worker.weight_sums import is_due

#: Of trainers with all-reduce stores, which every worker makes in the same order.
_numbers = itertools.count()


class DeviceUpdates:
    """Sums gradients over devices, and runs one optimizer per device.

    Args:
        store: sums the gradients; None: there is one device.
        takes_rows: the store supports row-sparse gradients.
    """

    on_store = False

    def __init__(
        self,
        plan: OptimizerPlan,
        contexts: Sequence[Context],
        clip: GradientClip,
        store: KVStoreBase | None,
        prefix: str = "",
        takes_rows: bool = False,
    ) -> None:
        self._plan, self._store, self._clip, self._prefix = plan, store, clip, prefix
        self._takes_rows = takes_rows
        self._shared = store if isinstance(store, DistStore | AllReduceStore) and store.num_workers > 1 else None
        if isinstance(self._shared, AllReduceStore):
            self._name = f"trainer {next(_numbers)}"
        elif self._shared is not None:
            self._name = self._shared.name
        self._optimizers: list[KeyedOptimizer] = [plan.build(plan.key_options()) for _ in contexts]
        self._alike = AlikeValues() if len(contexts) > 1 else None

    def start(self, everything: Mapping[str, Parameter], trained: Mapping[str, Parameter]) -> None:
        """Broadcast rank 0's values, and set up the optimizers with the devices' values."""
        if self._store is not None:
            broadcast(self._store, everything, by_rows=False, prefix=self._prefix)
        for key, one in trained.items():
            for optimizer, param in zip(self._optimizers, one.on_devices(), strict=True):
                optimizer.add(key, param)
        if self._alike is not None:
            self._alike.note(trained)

    def step(self, trained: Mapping[str, Parameter], scale: float, step: int, samples: float) -> None:
        """Sum the gradients, then update.

        Workers scale before the sum, because each has its own batch size. So all get the same gradient.
        """
        before, after = (1.0, scale) if self._store is None or self._store.num_workers == 1 else (scale, 1.0)
        self.allreduce(trained, before)
        self.update(trained, after, step)

    def allreduce(self, trained: Mapping[str, Parameter], scale: float = 1.0) -> None:
        """Sum the gradients, times ``scale``, over devices and workers, in place.

        Raises:
            PacelineError: a value was set on some of the devices only.
        """
        if self._store is None:
            return
        self._check_alike(trained)
        if not self._takes_rows:
            densify(trained)
        grads = collect(trained, everywhere=self._store.num_workers > 1)
        if scale != 1.0:
            torch._foreach_mul_([one for some in grads.values() for one in some], scale)
        if grads:
            self._store.pushpull([self._prefix + key for key in grads], list(grads.values()))

    def update(self, trained: Mapping[str, Parameter], scale: float, step: int) -> None:
        """Update every device's values from its gradients."""
        groups, keys = self._plan.groups_at(step), self._plan.key_options()
        grads = {key: self._private(trained[key], one) for key, one in collect(trained, everywhere=False).items()}
        for index, optimizer in enumerate(self._optimizers):
            optimizer.set_options(groups, keys)
            merged: dict[Key, torch.Tensor] = {key: one[index] for key, one in grads.items()}
            for key in merged:
                value = trained[str(key)].on_devices()[index]
                if key in optimizer.keys:
                    optimizer.follow(key, value)
                else:
                    optimizer.add(key, value)
            optimizer.update(merged, self._clip(list(merged.values()), scale) if self._clip else scale)
        if self._alike is not None:
            self._alike.note(trained)
        if self._shared is not None and is_due(step + 1):
            self._shared.tell_step(self._name, step + 1, {key: one.data() for key, one in trained.items()}, None)

    def _check_alike(self, trained: Mapping[str, Parameter]) -> None:
        for key in [] if self._alike is None else self._alike.unlike(trained):
            raise PacelineError(
                f"parameter {key!r} differs between its devices, {listed(map(str, trained[key].list_ctx()))}: a "
                "write changed some of its copies only. param.set_data(value) and net.load_state_dict change all of "
                "them; param.data() is the copy of the first device, and param.list_data() are all copies"
            )

    def _private(self, parameter: Parameter, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return gradients that may be overwritten, without repeated rows."""
        unique = [one.coalesce() if one.is_sparse else one for one in grads]
        return [one.clone() for one in unique] if parameter.grad_req == "add" else unique

    def assign(self, key: str, value: torch.Tensor) -> None:
        """Set a value in the optimizers too: they may keep a float32 copy."""
        for optimizer in self._optimizers:
            optimizer.set_value(key, value)

    def take(self, everything: Mapping[str, Parameter]) -> None:
        """Read the values that were set on the devices."""
        for key, one in everything.items():
            if key in self._optimizers[0].keys:
                self.assign(key, one.data())

    def states(self) -> States:
        """Return the optimizer's state by key, from the first device, because all devices have the same."""
        first = self._optimizers[0]
        return {key: first.state(key) for key in first.keys}

    def set_states(self, states: States) -> None:
        """Set the state of every device's optimizer.

        Raises:
            ValueError: the states are of another model. No state changes.
        """
        self.check(states, "the state")
        for optimizer in self._optimizers:
            for key, state in states.items():
                optimizer.load_state(key, state)

    def check(self, states: States, where: str) -> None:
        """Raise if states are of another model.

        Raises:
            ValueError: names ``where`` they are, and the parameters.
        """
        unknown = [key for key in states if key not in self._optimizers[0].keys]
        if unknown:
            raise ValueError(f"{where} has parameters that this trainer does not have: {', '.join(map(str, unknown))}")
        for key, state in states.items():
            self._optimizers[0].check_state(key, state)


class WorkerUpdates(DeviceUpdates):
    """Sums gradients over the devices of all workers of a distributed store."""

    def __init__(self, plan: OptimizerPlan, contexts: Sequence[Context], clip: GradientClip, store: DistStore) -> None:
        super().__init__(plan, contexts, clip, store)
        self._options_of = store

    def step(self, trained: Mapping[str, Parameter], scale: float, step: int, samples: float) -> None:
        """Tell the servers the options, which they compare between workers; sum the gradients, then update."""
        self._options_of.samples = samples
        self._options_of.optimizer.set_options(self._plan.groups_at(step), self._plan.key_options())
        super().step(trained, scale, step, samples)
