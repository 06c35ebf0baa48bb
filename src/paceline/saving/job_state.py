"""Saves and resumes a job: ``paceline.save`` and ``paceline.load``."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.parameter import is_lazy

from paceline.errors import CheckpointError
from paceline.kvstore.base import KVStore, KVStoreBase
from paceline.kvstore.checkpoint import collective
from paceline.kvstore.checkpoint.collective import Content
from paceline.kvstore.checkpoint.tensor_file import TensorFile, understood
from paceline.kvstore.dist import DistStore
from paceline.layout.plain import Packer, unpack
from paceline.mx.gluon.replicate import ReplicatedModule
from paceline.mx.gluon.trainer import Trainer
from paceline.optim import DistributedOptimizer
from paceline.saving import generators

logger = logging.getLogger(__name__)

KIND = "a training job"


class Stateful(Protocol):
    """An object whose state can be saved: a module, a torch optimizer, a ``Trainer``."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Set the state."""


class Checkpoint(NamedTuple):
    """Result of :func:`load`.

    Attributes:
        step: as given to :func:`save`.
        extra: as this worker gave it to :func:`save`.
    """

    step: int
    extra: Any


def save(
    path: str | os.PathLike[str],
    model: Stateful,
    optimizer: Stateful,
    *,
    step: int,
    extra: Any = None,
    rng: bool = True,
) -> None:
    """Write a checkpoint. With :func:`load` training resumes from it with the same bits.

    Every worker of the job calls it, between two steps; it is a barrier. Worker 0 writes model (buffers too) and
    optimizer to ``path``. Each other worker writes its own state (residuals of its codec, its random numbers, its
    ``extra``) to ``<path>.rank<r>.<digest>``. The files belong together. They replace the previous checkpoint only when
    all of them are on the disk. If workers do not wait for each other, the weights are the servers' at that
    moment.

    Args:
        path: path of the file; the same for all workers, on a disk that all of them can access.
        model: the network, or gluon's replicated network.
        optimizer: any torch optimizer, a ``DistributedOptimizer``, or gluon's ``Trainer``.
        step: number of steps so far.
        extra: numbers, strings, tensors, and lists, tuples and dictionaries of them: state of schedulers, samplers,
            scalers. :func:`load` returns each worker's own.
        rng: save the random numbers of Python, NumPy and torch, so that dropout and shuffling resume too.

    Raises:
        CheckpointError: on all workers: one of them could not write; the text says why. The previous checkpoint is
            unchanged.
        TypeError: ``extra`` or a state holds other things than plain data and tensors.
    """
    store = _store_of(optimizer)
    if isinstance(store, KVStore):
        store.barrier()  # with dist_ksync another worker's last push may wait for a push of one that saves already

    def common() -> Content:
        packer = Packer()
        states = {
            "model": _newest(store, model.state_dict(), optimizer),
            "optimizer": _without_residuals(optimizer.state_dict()),
        }
        content = {name: packer.pack(state, name) for name, state in states.items()}
        return Content(packer.tensors, {"content": content, "optimizer": _name_of(optimizer)})

    def own() -> Content:
        packer = Packer()
        states = {"extra": extra, "rng": generators.state_of_generators() if rng else None, "residuals": None}
        if store is not None and store.keeps_residuals:
            states["residuals"] = store.codec_states()
        return Content(packer.tensors, {"content": {name: packer.pack(one, name) for name, one in states.items()}})

    collective.save(store, path, KIND, common, own, step)


def load(path: str | os.PathLike[str], model: Stateful, optimizer: Stateful, *, rng: bool = True) -> Checkpoint:
    """Resume from a checkpoint: ``step, extra = paceline.load("job.ckpt", model, optimizer)``.

    Every worker of the job calls it, with the model and the optimizer created as for training from the start. With the
    same number of workers training resumes with the same bits, with any number of servers (if servers step by Adam:
    only if keys are cut in the same places). With another number of workers, new workers start without residuals and
    with their own random numbers, and get worker 0's ``extra``.

    Args:
        path: as given to :func:`save`.
        model: as given to :func:`save`.
        optimizer: as given to :func:`save`.
        rng: load the random numbers too, if they were saved.

    Returns:
        Step and extra.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: on all workers: a file is missing or damaged, or is of another save, model or optimizer.
            No state is changed.
    """
    store = _store_of(optimizer)
    loaded = collective.load(store, path, KIND, everywhere=True)
    common = loaded.common
    assert common is not None, "every worker has read it"
    content: dict[str, Any] = {}
    own: dict[str, Any] = {}

    def understand() -> None:
        with understood(common.path):
            content.update(unpack(common.manifest["content"], common.tensors))
            own.update(_own(common, loaded.own) | ({} if rng else {"rng": None}))
            _check(common, content, own, model, optimizer)

    collective.agree(store, "comparing with model and optimizer", understand)
    _set_weights(model, optimizer, content["model"])
    with understood(common.path):  # what only the optimizer and the store understand
        optimizer.load_state_dict(content["optimizer"])
        if store is not None:
            _set_residuals(store, own["residuals"], loaded.told["workers"])
    if isinstance(store, KVStore):
        store.barrier()
    if own["rng"] is not None:
        generators.set_state(own["rng"])
    return Checkpoint(common.manifest["step"], own["extra"])


def _set_weights(model: Stateful, optimizer: Stateful, state: dict[str, Any]) -> None:
    """Set weights and buffers, on the servers too."""
    if isinstance(optimizer, Trainer) and isinstance(model, ReplicatedModule) and model.has_shapes:
        for replica in model.replicas:
            replica.load_state_dict(state)
        optimizer.take_weights()
        return
    model.load_state_dict(state)
    if hasattr(optimizer, "broadcast_weights"):
        optimizer.broadcast_weights()


def _newest(store: KVStoreBase | None, state: dict[str, Any], optimizer: Stateful) -> dict[str, Any]:
    """Return a model's state with the servers' weights, if other workers may have changed them.

    The model gets them too: this worker's next step finds the weights that it knows of the servers.
    """
    if not isinstance(store, DistStore) or store.policy.merge == "all":
        return state
    keys = set(store.table.keys)
    names = [name for name in state if name in keys]
    values = [torch.empty_like(state[name], device="cpu") for name in names]
    store.pull(names, values)
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.refresh_weights()
    return {**state, **dict(zip(names, values, strict=True))}


def _store_of(optimizer: Stateful) -> KVStoreBase | None:
    store = getattr(optimizer, "kvstore", None)
    return store if isinstance(store, KVStoreBase) else None


def _name_of(optimizer: Stateful) -> str:
    """Return the name of an optimizer: of a ``Trainer`` its optimizer's name, else the class."""
    return str(getattr(optimizer, "optimizer_name", type(getattr(optimizer, "inner", optimizer)).__name__))


def _without_residuals(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without the residuals, which each worker saves itself."""
    if "codec_states" not in state:
        return state
    return state | {"codec_states": state["codec_states"] | {"pushes": {}}}


def _own(common: TensorFile, own: TensorFile | None) -> dict[str, Any]:
    """Return this worker's own saved state; if there is none, the defaults for a new worker."""
    if own is not None:
        return unpack(own.manifest["content"], own.tensors)  # type: ignore[no-any-return]
    first = common.manifest["own"]["content"]
    tensors = {name.removeprefix(collective.OWN): one for name, one in common.tensors.items()}
    return {"extra": unpack(first["extra"], tensors), "rng": None, "residuals": None}


def _set_residuals(store: KVStoreBase, residuals: Any, workers: int) -> None:
    if not store.keeps_residuals:
        return
    if residuals is None:
        logger.warning(
            "worker %d: no residuals were saved for it (%d workers saved); its residuals start at 0",
            store.rank, workers,
        )  # fmt: skip
    elif store.rank == 0 and workers > store.num_workers:
        logger.warning(
            "residuals of workers %d to %d are lost: the job has fewer workers now", store.num_workers, workers - 1
        )
    store.set_codec_states(residuals or {})


def _check(
    common: TensorFile, content: dict[str, Any], own: dict[str, Any], model: Stateful, optimizer: Stateful
) -> None:
    """Raise if the checkpoint does not match model and optimizer, before anything changes."""
    path, name = common.path, _name_of(optimizer)
    for part, kind in ((content["model"], dict), (content["optimizer"], dict), (own["extra"], object)):
        if not isinstance(part, kind):
            raise TypeError(f"{type(part).__name__} in place of a state")
    if common.manifest["optimizer"] != name:
        raise CheckpointError(f"{path} holds the state of {common.manifest['optimizer']}, but the optimizer is {name}")
    _check_same(path, _shapes(content["model"]), _shapes(model.state_dict()))
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = [len(group["params"]) for group in content["optimizer"]["param_groups"]]
        ours = [len(group["params"]) for group in optimizer.param_groups]
        if groups != ours:
            raise CheckpointError(f"{path}: its optimizer has param groups of {groups} parameters, this one of {ours}")
    if own["rng"] is not None:
        try:
            generators.check_state(own["rng"])
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}; with rng=False random numbers stay as they are") from error
    store = _store_of(optimizer)
    if store is not None and store.keeps_residuals and own["residuals"]:
        _check_residuals(path, own["residuals"], store.codec_states())


def _shapes(state: dict[str, Any]) -> dict[str, Any]:
    """Return the shapes of tensors by name; None for values without a shape, or without one yet."""
    with_shape = {name for name, one in state.items() if isinstance(one, torch.Tensor) and not is_lazy(one)}
    return {name: tuple(one.shape) if name in with_shape else None for name, one in state.items()}


def _check_same(path: os.PathLike[str], saved: dict[str, Any], ours: dict[str, Any]) -> None:
    for name in [*saved, *ours]:
        if name not in ours or name not in saved:
            whose = "the checkpoint" if name in saved else "this model"
            raise CheckpointError(f"{path} is of another model: only {whose} has {name!r}")
        if saved[name] != ours[name] and ours[name] is not None:
            raise CheckpointError(
                f"{path} is of another model: {name!r} has shape {saved[name]} there and {ours[name]} here"
            )


def _check_residuals(path: os.PathLike[str], saved: dict[Any, Any], ours: dict[Any, Any]) -> None:
    for key, state in saved.items():
        for name, one in state.items():
            known = ours.get(key, {}).get(name, one)
            if known.shape != one.shape:
                raise CheckpointError(f"{path}: {name} of key {key!r} has shape {tuple(one.shape)}: of another model")
