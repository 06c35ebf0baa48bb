"""Gluon's ``Trainer``: updates parameters with the gradients of all devices and workers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from paceline.kvstore.agreement import Fact
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.checkpoint import optimizer_states as state_files
from paceline.kvstore.start_checks import agree_on_store, option_facts, tensor_facts
from paceline.kvstore.weights import Weights
from paceline.mx.context import Context
from paceline.mx.gluon import gradients
from paceline.mx.gluon.buffers import SharedBuffers
from paceline.mx.gluon.clip import GradientClip, servers_norm
from paceline.mx.gluon.device_updates import DeviceUpdates
from paceline.mx.gluon.optimizer_plan import OptimizerLike, OptimizerPlan
from paceline.mx.gluon.parameter import Parameter, ParameterDict
from paceline.mx.gluon.replicate import ReplicatedModule
from paceline.mx.gluon.store_choice import Traits, Updates, choose_store, choose_updates, share_of, update_on_store
from paceline.mx.gluon.store_updates import ServerUpdates
from paceline.torch_hooks.wrappers import refuse_wrapped
from paceline.worker import notice

if TYPE_CHECKING:
    from paceline.compression import Compression

Parameters = ReplicatedModule | Mapping[str, Parameter] | Sequence[Parameter]


class Trainer:
    """Updates replicated parameters from the gradients of all devices, and of all workers of a distributed store.

    Gradients are **sums over samples** (as in Gluon). Call ``backward`` on the sum of the losses of each slice, and
    pass ``step`` the size of the whole batch: the total is divided by it. All replicas and workers start from rank 0's
    values. With a distributed store every worker creates a trainer, and waits there for the others (with lazy modules
    it waits at the first batch, when shapes are known). All workers have rank 0's buffers too (running means of
    ``BatchNorm``, for example), after ``net.eval()`` and in ``net.state_dict()``, and start from rank 0's values of the
    parameters that no trainer has.

    Args:
        params: a replicated module, its ``collect_params()``, or a list or dictionary of parameters.
        optimizer: a name (``"sgd"``), or any class or instance of ``torch.optim``. An instance must be made from the
            parameters of the replicated module; its ``param_groups`` are read at every step, so schedulers work.
        optimizer_params: options for a name or a class (see :class:`OptimizerPlan`).
        kvstore: a store type, a store, or None. ``local`` and ``device`` stores are not used for a single device.
            Several trainers may use one store: every trainer but the first gets a new store of the same kind, so that
            keys and optimizers are separate.
        compression_params: ``{"type": "2bit", "threshold": 0.5}``; needs a store. Distributed stores can compress pulls
            too (``"leg": "both"``, or a list of settings for different codecs). The threshold applies to the values
            that are compressed. In ``local`` and ``device`` stores these are every device's sums over samples, not yet
            divided by ``batch_size``; ``allreduce_grads`` pushes the worker's sums, not divided either. ``step`` with a
            distributed store pushes this worker's sum over its devices, divided by ``batch_size``: a mean if that is
            the number of the worker's samples.
        update_on_kvstore: run the optimizer in the store (True), on every device (False), or in the better place of
            the two (None).
        clip_grad_norm: scale the gradients, summed over devices and workers and divided by ``batch_size``, so that the
            2-norm of all of them together is at most this (``torch.nn.utils.clip_grad_norm_``).
        clip_grad_value: clamp every element of these gradients to plus or minus this, before the norm is computed. With
            either of the two bounds and a ``dist_sync`` store the devices run the optimizer by default; its servers can
            clip by one bound, not by both. ``dist_gsync`` clips each group's gradient; stores that do not merge pushes
            clip each worker's own gradient.

    Raises:
        TypeError: no parameters, or an unknown kind of optimizer, option or store.
        ValueError: parameters are on different devices or share a name, a name is unknown, or options conflict.
    """

    _averages = False
    """Whether pushes of workers in lock step become their mean over samples, and not their sum."""

    def __init__(
        self,
        params: Parameters,
        optimizer: OptimizerLike,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | KVStoreBase | None = "device",
        compression_params: Compression | None = None,
        update_on_kvstore: bool | None = None,
        *,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
    ) -> None:
        self._all = _by_name(params)
        self._contexts = _same_contexts(self._all)
        self._nets = list({id(one.net): one.net for one in self._all.values()}.values())
        self._plan = OptimizerPlan(optimizer, optimizer_params, self._trained())
        self._clip = GradientClip(clip_grad_norm, clip_grad_value)
        store = choose_store(kvstore, len(self._contexts), compression_params, self._traits().sparse_weights)
        # Conflicting options raise here. Sizes only matter for the default, and are known at the first step.
        on_store = update_on_store(update_on_kvstore, store, self._traits())
        clip_norm = servers_norm(self._clip, store, self._traits().rows) if on_store else 0.0
        self._wanted = True if clip_norm else update_on_kvstore
        self._store, self._prefix = share_of(store, clip_norm, self._averages)
        if compression_params:
            self._set_compression(compression_params)
        self._updates: Updates | None = None
        self._buffers: SharedBuffers | None = None
        self._weights = Weights.of(self._store)
        self._steps = 0
        # Before the first forward pass: its gradients must belong to the values that all workers start from.
        if all(net.has_shapes for net in self._nets):
            self._started()
        for net in self._nets:
            net.on_shapes(self._start_when_ready)

    @property
    def learning_rate(self) -> float:
        """The current learning rate (of the first param group, before ``lr_mult``)."""
        return self._plan.learning_rate

    @property
    def optimizer(self) -> OptimizerLike:
        """The optimizer as the user gave it."""
        return self._plan.optimizer

    @property
    def kvstore(self) -> KVStoreBase | None:
        """The store in use, or None."""
        return self._store

    @property
    def update_on_kvstore(self) -> bool:
        """Whether the store runs the optimizer."""
        return self._started().on_store

    @property
    def round(self) -> int:
        """Steps of this trainer whose updates the parameters hold.

        If the job has failed, ``net.state_dict()`` still returns the parameters of this round, or raises an error that
        names those that are of another one.
        """
        return self._weights.round

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step on, wherever the optimizer runs."""
        self._plan.set_learning_rate(lr)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for one in self._all.values():
            one.zero_grad()

    def step(
        self, batch_size: float, ignore_stale_grad: bool = False, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        """Sum the gradients of all devices and workers, divide by ``batch_size`` and update all parameters.

        The step clears the gradients after use (see ``Parameter.grad_req``).

        Args:
            batch_size: samples in the whole batch of this worker; it may change from step to step.
            ignore_stale_grad: skip parameters that backward has not reached. With several workers their gradients count
                as zero instead, because all workers must push the same keys.
            scaler: the ``GradScaler`` that scaled the losses. It divides the gradients, skips the step when a gradient
                has overflowed, and is updated.

        Raises:
            StaleGradientError: backward has not reached a parameter since the last step. No value changes.
            ValueError: ``batch_size`` is not above 0.
        """
        self._check_step(batch_size, ignore_stale_grad)
        if scaler is None:
            self._step(batch_size)
        else:
            self._scaled_step(scaler, batch_size)
        gradients.use_up(self._trained())
        notice.step()

    def allreduce_grads(self) -> None:
        """Sum the gradients over devices and workers, in place, without an update: for clipping and the like.

        Raises:
            ValueError: the store runs the optimizer; use ``update_on_kvstore=False``.
        """
        updates = self._on_devices("allreduce_grads")
        with self._published():
            updates.allreduce(self._trained())

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update all parameters from gradients that ``allreduce_grads`` has summed.

        Raises:
            StaleGradientError: as in :meth:`step`.
            ValueError: as in :meth:`step`, or the store runs the optimizer.
        """
        updates = self._on_devices("update")
        self._check_step(batch_size, ignore_stale_grad)
        with self._weights.changing(self._tensors()):
            updates.update(self._trained(), self._scale(batch_size), self._steps)
        self._steps += 1
        gradients.use_up(self._trained())
        notice.step()

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Write the optimizer's state (safetensors with a manifest), wherever the optimizer runs.

        With compressed gradients every worker calls it: each worker holds residuals, and writes them to a file beside
        the state (see ``KVStore.save_optimizer_states``).

        Raises:
            CheckpointError: the file cannot be written; an old file is unchanged.
        """
        states, name, groups = self._started().states, self.optimizer_name, self._plan.groups()
        state_files.save(self._store, fname, states, self._steps, optimizer=name, groups=groups)

    def load_states(self, fname: str | os.PathLike[str], options: bool = True) -> None:
        """Read a file of :meth:`save_states`, with any store and any number of devices. Every worker calls it.

        Args:
            fname: path of the file.
            options: also set the optimizer's options (the learning rate, for example) and the number of steps, from
                which an ``lr_scheduler`` goes on, as MXNet does.

        Raises:
            CheckpointError: a file is missing or damaged, or belongs to another save. No state changes.
            ValueError: the states belong to another optimizer or model. No state changes.
        """
        updates = self._started()
        everywhere = not isinstance(updates, ServerUpdates)
        loaded = state_files.load(self._store, fname, everywhere, self.optimizer_name)
        if loaded.states is not None:
            updates.check(loaded.states, os.fspath(fname))
        if options and loaded.groups is not None:
            self._plan.check_groups(loaded.groups)
        updates.set_states(loaded.states or {})
        state_files.set_residuals(self._store, loaded.own)
        if options and loaded.groups is not None:
            self._plan.set_groups(loaded.groups)
        if options and loaded.step is not None:
            self._steps = loaded.step

    def take_weights(self) -> None:
        """Use values that were set in the replicas, the same on every worker. Every worker calls it.

        If a distributed store holds the values, all workers get rank 0's.
        """
        with self._weights.changing(self._tensors(), rounds=0):
            self._started().take(self._all)

    @property
    def optimizer_name(self) -> str:
        """The name of the optimizer."""
        return self._plan.spec.name

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, its options and the number of steps, as plain data and tensors.

        Residuals of codecs are not included; :func:`paceline.save` saves them too.
        """
        states = self._started().states()
        return {
            "optimizer": self.optimizer_name, "groups": self._plan.groups(), "steps": self._steps, "states": states
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set what :meth:`state_dict` returned. Every worker calls it.

        Raises:
            ValueError: the state belongs to another optimizer or model.
        """
        if state_dict["optimizer"] != self.optimizer_name:
            raise ValueError(
                f"the state is of {state_dict['optimizer']!r}, but the optimizer is {self.optimizer_name!r}"
            )
        updates = self._started()
        self._plan.check_groups(state_dict["groups"])
        updates.set_states(state_dict["states"])
        self._plan.set_groups(state_dict["groups"])
        self._steps = state_dict["steps"]

    def _trained(self) -> dict[str, Parameter]:
        return {key: one for key, one in self._all.items() if one.grad_req != "null"}

    def _tensors(self) -> dict[str, list[torch.nn.Parameter]]:
        return {key: one.on_devices() for key, one in self._trained().items()}

    def _scale(self, batch_size: float) -> float:
        return self._plan.rescale / batch_size

    def _check_step(self, batch_size: float, ignore_stale_grad: bool) -> None:
        if not 0 < batch_size < float("inf"):
            raise ValueError(f"batch_size is {batch_size}; it is the number of samples in the whole batch, above 0")
        self._started()
        if self._steps == 0:
            self._refuse_wrapped()
        if not ignore_stale_grad:
            gradients.check_fresh(self._trained())

    def _refuse_wrapped(self) -> None:
        """Raise if DDP or the like merges the gradients, too: before the start, and at the first step."""
        if self._store is not None and self._store.num_workers > 1:
            params = [copy for one in self._trained().values() for copy in one.on_devices()]
            refuse_wrapped(params, None, self._store.rank)

    def _step(self, batch_size: float) -> None:
        updates = self._started()
        with self._published(), self._weights.changing(self._tensors()):
            updates.step(self._trained(), self._scale(batch_size), self._steps, batch_size)
        self._steps += 1

    def _before_reading(self) -> None:
        own = ", and buffers such as running means are this worker's own"
        self._weights.read(lambda: None if self._buffers is None else self._buffers.take(), own)

    def _before_forward(self) -> None:
        if self._buffers is not None and self._buffers.forward_begins():
            self._before_reading()

    @contextmanager
    def _published(self) -> Iterator[None]:
        """Send rank 0's buffers to the other workers, which have them when they are next read after a block of code."""
        if self._buffers is not None:
            self._buffers.publish()
        yield
        if self._buffers is not None:
            self._buffers.settled()

    def _scaled_step(self, scaler: torch.amp.GradScaler, batch_size: float) -> None:
        if self._store is not None and self._store.num_workers > 1:
            raise ValueError("a GradScaler may skip steps on one worker alone; use bfloat16 with several workers")
        copies = [copy for one in self._trained().values() for copy in one.on_devices()]
        all_as_one: Any = SimpleNamespace(param_groups=[{"params": copies}], step=partial(self._step, batch_size))
        scaler.step(all_as_one)
        scaler.update()

    def _set_compression(self, params: Compression) -> None:
        assert self._store is not None, "compression was refused without a store"
        try:
            self._store.set_gradient_compression(params)
        except NotImplementedError as error:
            raise ValueError(f"a {self._store.type} store cannot compress gradients") from error

    def _started(self) -> Updates:
        """Set everything up; shapes must be known."""
        if self._updates is None:
            on_store = update_on_store(self._wanted, self._store, self._traits())
            self._refuse_wrapped()
            self._updates = choose_updates(on_store, self._plan, self._store, self._contexts, self._clip, self._prefix)
            if self._store is not None:
                agree_on_store(self._store, "the trainer", self._facts(on_store))
            self._updates.start(self._all, self._trained())
            for key, one in self._all.items():
                one.on_set(partial(self._updates.assign, key))
            if self._store is not None and self._store.num_workers > 1:
                self._buffers = SharedBuffers(self._store, self._nets, self._prefix)
            for net in self._nets:
                net.before_reading(self._before_reading)
                net.before_forward(self._before_forward)
        return self._updates

    def _on_devices(self, verb: str) -> DeviceUpdates:
        """Return the updates on devices; ``verb`` is one half of a step, between which a loop may change gradients."""
        updates = self._started()
        if isinstance(updates, DeviceUpdates):
            return updates
        assert self._store is not None
        raise ValueError(
            f"{verb} is impossible: the {self._store.type} store runs the optimizer, so call step; or make the Trainer "
            "with update_on_kvstore=False"
        )

    def _facts(self, on_store: bool) -> list[Fact]:
        """Return the facts that must be the same on all workers."""
        trained = self._trained()
        values = tensor_facts([(key, one.on_devices()[0]) for key, one in self._all.items()])
        facts = [
            fact if key in trained else fact._replace(value=f"{fact.value}, not trained")
            for key, fact in zip(self._all, values, strict=True)
        ]
        choices = {
            "update_on_kvstore": on_store,
            "clip_grad_norm": self._clip.norm,
            "clip_grad_value": self._clip.value,
        }
        buffers = [
            (f"{number} {name}" if number else name, one)
            for number, net in enumerate(self._nets)
            for name, one in net.replicas[0].named_buffers()
        ]
        facts += tensor_facts(buffers, "buffer")
        return [*self._plan.facts(), *option_facts("the trainer", choices), *facts]

    def _traits(self) -> Traits:
        """Return the properties that decide where the optimizer runs; sizes are 0 until shapes are known."""
        known = [one.on_devices()[0].numel() for one in self._all.values() if one.has_shape]
        weights = any(one.stype == "row_sparse" for one in self._all.values())
        gradients = any(one.grad_stype == "row_sparse" for one in self._trained().values())
        return Traits(max(known, default=0), weights, gradients, bool(self._clip))

    def _start_when_ready(self) -> None:
        if all(net.has_shapes for net in self._nets):
            self._started()


def _by_name(params: Parameters) -> dict[str, Parameter]:
    if isinstance(params, ReplicatedModule):
        params = params.collect_params()
    if isinstance(params, Mapping | ParameterDict):
        table = dict(params)
    elif isinstance(params, Sequence) and all(isinstance(one, Parameter) for one in params):
        table = {one.name: one for one in params}
        if len(table) < len(params):
            raise ValueError("two parameters have the same name; pass a dictionary with distinct names")
    else:
        raise TypeError(
            f"params is {type(params).__name__}; give replicate(net, devices), its collect_params(), or parts of them"
        )
    if not table or not all(isinstance(one, Parameter) for one in table.values()):
        raise TypeError("params must be gluon parameters, at least one: replicate(net, devices).collect_params()")
    return table


def _same_contexts(params: Mapping[str, Parameter]) -> list[Context]:
    (first, one), *others = params.items()
    for key, other in others:
        if other.list_ctx() != one.list_ctx():
            raise ValueError(
                f"all parameters of a trainer must be on the same devices, but {first!r} is on {one.list_ctx()} "
                f"and {key!r} on {other.list_ctx()}; use one trainer for each"
            )
    return one.list_ctx()
