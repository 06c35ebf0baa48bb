"""The two places where a trainer's optimizer can run: in the store, or on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from paceline.context import Context
from paceline.errors import PacelineError
from paceline.gluon.clip import GradientClip
from paceline.gluon.gradients import collect, densify
from paceline.gluon.optimizer_plan import OptimizerPlan
from paceline.gluon.parameter import Parameter
from paceline.gluon.server_clip import ServerClip
from paceline.gluon.store_choice import is_distributed
from paceline.keys import Key
from paceline.kvstore.base import KVStore, KVStoreBase
from paceline.kvstore.checkpoint import optimizer_states as state_files
from paceline.kvstore.dist import DistStore
from paceline.kvstore.inprocess.optimizer import KeyedOptimizer, check_state
from paceline.kvstore.inprocess.store import InProcessStore
from paceline.updaters import KeyOptions, Options
from paceline.updaters.rows import LAZY, to_rows


def _broadcast(store: KVStoreBase, parameters: Mapping[str, Parameter], by_rows: bool, prefix: str = "") -> None:
    """Start all devices and workers from rank 0's values, those of frozen parameters too."""
    outs = [one.list_data() for one in parameters.values()]
    values = [
        to_rows(out[0]) if by_rows and one.is_row_sparse else out[0]
        for one, out in zip(parameters.values(), outs, strict=True)
    ]
    store.broadcast([prefix + key for key in parameters], values, outs)


def _scaled(parameter: Parameter, grads: Sequence[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """Return gradients times ``scale``: in place where they are used up anyway, else copies."""
    return [one.mul_(scale) if parameter.grad_req == "write" else one * scale for one in grads]


States: TypeAlias = dict[Key, dict[str, Any]]


class StoreUpdates:
    """The store runs the optimizer: gradients go in, new values come out."""

    def __init__(
        self, plan: OptimizerPlan, store: KVStoreBase | None, contexts: Sequence[Context], clip: GradientClip
    ) -> None:
        assert isinstance(store, KVStore), "only a KVStore is capable of an optimizer"
        self._plan, self._store = plan, store
        self._sent: tuple[list[Options], dict[Key, KeyOptions]] | None = None
        self._clip: ServerClip | None = None
        if clip and isinstance(store, DistStore):
            self._clip = ServerClip(clip, store)
        elif clip:
            assert isinstance(store, InProcessStore), "refused before"
            store.clip = clip

    def start(self, everything: Mapping[str, Parameter], trained: Mapping[str, Parameter]) -> None:
        """Send the optimizer and the first values."""
        keys, precision = self._plan.key_options(), self._plan.multi_precision
        self._store.set_optimizer(self._plan.optimizer, keys=keys, multi_precision=precision, **self._plan.options)
        _broadcast(self._store, everything, by_rows=True)

    def step(self, trained: Mapping[str, Parameter], scale: float, step: int, samples: float) -> None:
        """Push all gradients and pull all values."""
        self._announce(step, samples)
        if not isinstance(self._store, InProcessStore):
            densify({key: one for key, one in trained.items() if not one.is_row_sparse})
            grads = collect(trained, everywhere=self._store.num_workers > 1)
            scaled = {key: _scaled(trained[key], one, scale) for key, one in grads.items()}
            self._exchange(trained, scaled if self._clip is None else self._clip.own(scaled))
            return
        self._store.scale = scale
        try:
            self._exchange(trained, collect(trained, everywhere=False))
        finally:
            self._store.scale = 1.0

    def _announce(self, step: int, samples: float) -> None:
        """Tell the store what the coming pushes mean."""
        groups = self._plan.groups_at(step)
        options = groups if self._clip is None else self._clip.options(groups), self._plan.key_options()
        if options != self._sent:
            self._store.set_options(*options)
            self._sent = options
        self._store.samples = samples

    def _exchange(self, trained: Mapping[str, Parameter], grads: Mapping[str, Sequence[torch.Tensor]]) -> None:
        by_rows = {key: one for key, one in grads.items() if self._changes_rows(trained[key], one)}
        if not grads:
            return
        if not by_rows:
            outs = [trained[key].list_data() for key in grads]
            if self._clip is None:
                self._store.pushpull(list(grads), list(grads.values()), out=outs)
            else:
                self._clip.exchange(grads, outs)
            return
        self._store.push(list(grads), list(grads.values()))
        if dense := [key for key in grads if key not in by_rows]:
            self._store.pull(dense, [trained[key].list_data() for key in dense])
        for key, one in by_rows.items():
            touched = torch.cat([grad._indices()[0].cpu() for grad in one])
            self._store.row_sparse_pull(key, trained[key].list_data(), row_ids=touched)

    def assign(self, key: str, value: torch.Tensor) -> None:
        """Set a stored value."""
        if not isinstance(self._store, InProcessStore):
            raise PacelineError(
                f"parameter {key!r} cannot be set: a {self._store.type} store holds it for all workers. Set it before "
                "the Trainer is made, or make it with update_on_kvstore=False and set it on every worker"
            )
        self._store.assign(key, value)

    def take(self, everything: Mapping[str, Parameter]) -> None:
        """Put the values of all parameters into the store; every worker calls it, and rank 0's count."""
        if isinstance(self._store, InProcessStore):
            for key, one in everything.items():
                self._store.assign(key, one.data())
            return
        if not isinstance(self._store, DistStore):
            raise PacelineError(f"a {self._store.type} store does not take values; set them before the Trainer is made")
        self._store.barrier()
        if self._store.rank == 0:
            self._store.set_values(list(everything), [one.data() for one in everything.values()])
        self._store.barrier()
        self._store.pull(list(everything), [one.list_data() for one in everything.values()])

    def states(self) -> States:
        """Return the optimizer's state by key."""
        if not hasattr(self._store, "optimizer_states"):
            raise PacelineError(f"a {self._store.type} store does not tell its optimizer's state")
        return self._store.optimizer_states()

    def set_states(self, states: States) -> None:
        """Set the optimizer's state; every worker calls it, and rank 0's counts."""
        if not hasattr(self._store, "set_optimizer_states"):
            raise PacelineError(f"a {self._store.type} store does not take its optimizer's state")
        if self._store.rank == 0:
            self._store.set_optimizer_states(states)
        self._store.barrier()

    def save(self, fname: str) -> None:
        """Write the optimizer's state."""
        self._store.save_optimizer_states(fname, dump_optimizer=True)

    def load(self, fname: str) -> None:
        """Read the optimizer's state."""
        self._store.load_optimizer_states(fname)

    def _changes_rows(self, parameter: Parameter, grads: Sequence[torch.Tensor]) -> bool:
        """Tell whether only the rows pushed from here change, so that only they need to be pulled."""
        alone = isinstance(self._store, InProcessStore) and self._plan.cls in LAZY and parameter.is_row_sparse
        return alone and all(one.is_sparse for one in grads)


class LocalUpdates:
    """Every device runs its own optimizer on the same summed gradients."""

    def __init__(
        self,
        plan: OptimizerPlan,
        store: KVStoreBase | None,
        contexts: Sequence[Context],
        clip: GradientClip,
        prefix: str = "",
    ) -> None:
        self._plan, self._store, self._clip, self._prefix = plan, store, clip, prefix
        self._optimizers: list[KeyedOptimizer] = [plan.build(plan.key_options()) for _ in contexts]

    def start(self, everything: Mapping[str, Parameter], trained: Mapping[str, Parameter]) -> None:
        """Take charge of every device's values."""
        if self._store is not None:
            _broadcast(self._store, everything, by_rows=False, prefix=self._prefix)
        for key, one in trained.items():
            for optimizer, param in zip(self._optimizers, one.on_devices(), strict=True):
                optimizer.add(key, param)

    def step(self, trained: Mapping[str, Parameter], scale: float, step: int, samples: float) -> None:
        """Sum the gradients, then update.

        Workers of a distributed store scale before the sum, as each has its own batch size: all get the same gradient.
        """
        if isinstance(self._store, KVStore) and is_distributed(self._store):
            self._store.samples = samples
            # For the servers to compare between workers.
            self._store.set_options(self._plan.groups_at(step), self._plan.key_options())
            self.allreduce(trained, scale)
            self.update(trained, 1.0, step)
            return
        self.allreduce(trained)
        self.update(trained, scale, step)

    def allreduce(self, trained: Mapping[str, Parameter], scale: float = 1.0) -> None:
        """Sum the gradients, times ``scale``, over devices and workers, in place."""
        if self._store is None:
            return
        if not isinstance(self._store, InProcessStore):
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
                if key not in optimizer.keys:
                    optimizer.add(key, trained[str(key)].on_devices()[index])
            optimizer.update(merged, self._clip(list(merged.values()), scale) if self._clip else scale)

    def _private(self, parameter: Parameter, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return gradients that may be overwritten; rows come once each."""
        unique = [one.coalesce() if one.is_sparse else one for one in grads]
        return [one.clone() for one in unique] if parameter.grad_req == "add" else unique

    def assign(self, key: str, value: torch.Tensor) -> None:
        """Take note of a value that is set from outside."""
        for optimizer in self._optimizers:
            optimizer.set_value(key, value)

    def take(self, everything: Mapping[str, Parameter]) -> None:
        """Take note of values that were set from outside."""
        for key, one in everything.items():
            if key in self._optimizers[0].keys:
                self.assign(key, one.data())

    def states(self) -> States:
        """Return the state of the first device, which is that of all."""
        first = self._optimizers[0]
        return {key: first.state(key) for key in first.keys}

    def set_states(self, states: States) -> None:
        """Set the state of every device's optimizer.

        Raises:
            ValueError: states of another model. Nothing is changed then.
        """
        self._check(states, "the state")
        for optimizer in self._optimizers:
            for key, state in states.items():
                optimizer.load_state(key, state)

    def _check(self, states: States, where: str) -> None:
        unknown = [key for key in states if key not in self._optimizers[0].keys]
        if unknown:
            raise ValueError(f"{where} has parameters that there are not here: {', '.join(map(str, unknown))}")
        for key, state in states.items():
            check_state(key, self._optimizers[0].value(key), state)

    def save(self, fname: str) -> None:
        """Write the state of the first device, which is that of all, and the residuals of the store with it."""
        store = self._store if isinstance(self._store, KVStore) else None
        state_files.save(store, fname, self.states, optimizer=self._plan.spec.name, groups=self._plan.groups())

    def load(self, fname: str) -> None:
        """Read the state into every device's optimizer."""
        store = self._store if isinstance(self._store, KVStore) else None
        states, own = state_files.load(store, fname, True, self._plan.spec.name)
        assert states is not None, "it was read here"
        self._check(states, fname)
        state_files.set_residuals(store, own)
        self.set_states(states)
