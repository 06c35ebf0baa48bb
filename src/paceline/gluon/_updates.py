"""The two places where a trainer's optimizer can run: in the store, or on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from paceline.context import Context
from paceline.errors import PacelineError
from paceline.gluon._gradients import collect, densify
from paceline.gluon._optimizer import OptimizerPlan
from paceline.gluon.parameter import Parameter
from paceline.kvstore import codec_files
from paceline.kvstore._local_base import InProcessStore
from paceline.kvstore._local_optimizer import KeyedOptimizer, check_state
from paceline.kvstore.base import Key, KVStore, KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.updaters import KeyOptions
from paceline.updaters.rows import LAZY


def _broadcast(store: KVStoreBase, parameters: Mapping[str, Parameter]) -> None:
    """Start all devices and workers from rank 0's values, those of frozen parameters too."""
    values = [one.list_data() for one in parameters.values()]
    store.broadcast(list(parameters), [one[0] for one in values], values)


def _scaled(parameter: Parameter, grads: Sequence[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """Return gradients times ``scale``: in place where they are used up anyway, else copies."""
    return [one.mul_(scale) if parameter.grad_req == "write" else one * scale for one in grads]


States: TypeAlias = dict[Key, dict[str, Any]]


class StoreUpdates:
    """The store runs the optimizer: gradients go in, new values come out."""

    def __init__(self, plan: OptimizerPlan, store: KVStoreBase | None, contexts: Sequence[Context]) -> None:
        assert isinstance(store, KVStore), "only a KVStore is capable of an optimizer"
        self._plan, self._store = plan, store
        self._keys: dict[Key, KeyOptions] = {}

    def start(self, everything: Mapping[str, Parameter], trained: Mapping[str, Parameter]) -> None:
        """Send the optimizer and the first values."""
        self._send_optimizer()
        _broadcast(self._store, everything)

    def _send_optimizer(self) -> None:
        self._keys, precision = self._plan.key_options(), self._plan.multi_precision
        self._store.set_optimizer(
            self._plan.optimizer, keys=self._keys, multi_precision=precision, **self._plan.options
        )

    def step(self, trained: Mapping[str, Parameter], scale: float, step: int, samples: float) -> None:
        """Push all gradients and pull all values."""
        if isinstance(self._store, InProcessStore):
            self._store.set_step(scale, self._plan.groups_at(step), self._plan.key_options())
            self._exchange(trained, collect(trained, everywhere=False))
        else:
            self._announce(step, samples)
            densify(trained)
            grads = collect(trained, everywhere=self._store.num_workers > 1)
            self._exchange(trained, {key: _scaled(trained[key], one, scale) for key, one in grads.items()})

    def _announce(self, step: int, samples: float) -> None:
        """Tell a distributed store what the coming pushes mean; it gets them scaled already."""
        groups, keys = self._plan.groups_at(step), self._plan.key_options()
        if hasattr(self._store, "set_options"):
            self._store.set_options(groups, None if keys == self._keys else keys)
        elif (groups, keys) != (self._plan.spec.groups, self._keys):
            raise ValueError(
                f"a {self._store.type} store cannot change options of its optimizer, such as rates and multipliers; "
                "make the Trainer with update_on_kvstore=False"
            )
        if hasattr(self._store, "samples"):
            self._store.samples = samples

    def _exchange(self, trained: Mapping[str, Parameter], grads: Mapping[str, Sequence[torch.Tensor]]) -> None:
        rows = {key: one for key, one in grads.items() if self._by_rows(one)}
        dense = [key for key in grads if key not in rows]
        if dense:
            outs = [trained[key].list_data() for key in dense]
            self._store.pushpull(dense, [grads[key] for key in dense], out=outs)
        for key, one in rows.items():
            self._store.push(key, one)
            touched = torch.cat([grad.coalesce().indices()[0].cpu() for grad in one])
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
        return self._store.optimizer_states()  # type: ignore[no-any-return]

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

    def _by_rows(self, grads: Sequence[torch.Tensor]) -> bool:
        """Tell whether only the rows pushed from here change, so that only they need to be pulled."""
        alone = isinstance(self._store, InProcessStore) and self._plan.cls in LAZY
        return alone and all(one.is_sparse for one in grads)


class LocalUpdates:
    """Every device runs its own optimizer on the same summed gradients."""

    def __init__(self, plan: OptimizerPlan, store: KVStoreBase | None, contexts: Sequence[Context]) -> None:
        self._plan, self._store = plan, store
        self._optimizers: list[KeyedOptimizer] = [plan.build(plan.key_options()) for _ in contexts]

    def start(self, everything: Mapping[str, Parameter], trained: Mapping[str, Parameter]) -> None:
        """Take charge of every device's values."""
        if self._store is not None:
            _broadcast(self._store, everything)
        for key, one in trained.items():
            for optimizer, param in zip(self._optimizers, one.on_devices(), strict=True):
                optimizer.add(key, param)

    def step(self, trained: Mapping[str, Parameter], scale: float, step: int, samples: float) -> None:
        """Sum the gradients, then update."""
        self.allreduce(trained)
        self.update(trained, scale, step)

    def allreduce(self, trained: Mapping[str, Parameter]) -> None:
        """Sum the gradients over devices and workers, in place."""
        if self._store is None:
            return
        if not isinstance(self._store, InProcessStore):
            densify(trained)
        grads = collect(trained, everywhere=self._store.num_workers > 1)
        if grads:
            self._store.pushpull(list(grads), list(grads.values()))

    def update(self, trained: Mapping[str, Parameter], scale: float, step: int) -> None:
        """Update every device's values from its gradients."""
        groups, keys = self._plan.groups_at(step), self._plan.key_options()
        grads = collect(trained, everywhere=False)
        for index, optimizer in enumerate(self._optimizers):
            optimizer.set_options(groups, keys)
            merged: dict[Key, torch.Tensor] = {key: one[index] for key, one in grads.items()}
            for key in merged:
                if key not in optimizer.keys:
                    optimizer.add(key, trained[str(key)].on_devices()[index])
                if trained[str(key)].grad_req == "add":
                    merged[key] = merged[key].clone()
            optimizer.update(merged, scale)

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
        codec_files.save(store, fname, self.states, optimizer=self._plan.spec.name, groups=self._plan.groups())

    def load(self, fname: str) -> None:
        """Read the state into every device's optimizer."""
        store = self._store if isinstance(self._store, KVStore) else None
        states, own = codec_files.load(store, fname, True, self._plan.spec.name)
        assert states is not None, "it was read here"
        self._check(states, fname)
        codec_files.set_residuals(store, own)
        self.set_states(states)
