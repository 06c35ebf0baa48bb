"""Files of the optimizer's state and of each worker's residuals of pushes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.checkpoint import collective
from paceline.kvstore.checkpoint.collective import Content
from paceline.kvstore.checkpoint.tensor_file import TensorFile, understood
from paceline.layout.keys import Key
from paceline.updaters import Options, check_numbers

logger = logging.getLogger(__name__)

KIND = "optimizer states"
States = dict[Key, dict[str, Any]]


def save(
    store: KVStoreBase | None,
    fname: str | os.PathLike[str],
    states: Callable[[], Mapping[Key, Mapping[str, Any]]],
    step: int | None = None,
    **manifest: Any,
) -> None:
    """Write the optimizer's state. If a codec keeps residuals every worker calls this, else one worker is enough.

    The store has the codec; without a store there is none. ``states`` returns the state by key. The manifest is plain
    data about the optimizer.

    Raises:
        CheckpointError: the file cannot be written; an old file is unchanged.
    """

    def content() -> Content:
        tensors, keys = flatten(states(), "state/")
        return Content(tensors, {**manifest, "keys": keys})

    def own() -> Content:
        tensors, keys = flatten({} if store is None else store.codec_states(), "residual/")
        return Content(tensors, {"residuals": keys})

    if store is None or not store.keeps_residuals:
        collective.write_common(store, fname, KIND, content(), step)
    else:
        collective.save(store, fname, KIND, content, own, step)


class LoadedStates(NamedTuple):
    """The content of a file of :func:`save`, as one worker has read it."""

    states: States | None
    """By key; None on workers that do not read it."""
    own: TensorFile | None
    """This worker's own file, for :func:`set_residuals`."""
    step: int | None
    """Number of steps of a trainer; None: not saved. All workers know it."""
    groups: list[Options] | None
    """The options per param group; None: not saved. All workers know them."""

    def options(self, count: int) -> list[Options]:
        """Return the saved options of an optimizer with so many param groups; none if they were not saved.

        Raises:
            ValueError: the saved optimizer has another number of groups, or a number of it is none.
        """
        check_numbers(self.groups or [])
        if self.groups is not None and len(self.groups) != count:
            raise ValueError(f"options of {len(self.groups)} param groups, but the optimizer has {count}")
        return self.groups or []


def load(
    store: KVStoreBase | None, fname: str | os.PathLike[str], everywhere: bool, optimizer: str | None = None
) -> LoadedStates:
    """Read the optimizer's state: every worker needs it (``everywhere``), or only worker 0. Every worker calls this.

    Raises:
        CheckpointError: a file is missing or damaged, is of another save, or is not a file of optimizer states.
        ValueError: the state is of another optimizer. On all workers.
    """
    loaded = collective.load(store, fname, KIND, everywhere)
    found, step, groups = (loaded.told[name] for name in ("optimizer", "step", "groups"))
    if optimizer is not None and found != optimizer:
        raise ValueError(f"{os.fspath(fname)!r} holds states of {found!r}, but the optimizer is {optimizer!r}")
    file = loaded.common
    states: States | None = None
    if file is not None:
        with understood(fname):
            states = restore(file.tensors, file.manifest["keys"], "state/")
    return LoadedStates(states, loaded.own, step, groups)


def set_residuals(store: KVStoreBase | None, own: TensorFile | None) -> None:
    """Set the residuals of this worker's codec from its own file, if it keeps any. If none were saved, they become 0.

    Raises:
        ValueError: the residuals are of another model. Then none is changed.
    """
    if store is None or not store.keeps_residuals:
        return
    if own is None or "residuals" not in own.manifest:
        logger.warning("worker %d: no residuals were saved for it; its residuals start at 0", store.rank)
        store.set_codec_states({})
        return
    with understood(own.path):
        states: dict[Key, dict[str, torch.Tensor]] = restore(own.tensors, own.manifest["residuals"], "residual/")
    store.set_codec_states(states)


# ---- named tensors and plain data ------------------------------------------------------------------------------------


def flatten(
    states: Mapping[Key, Mapping[str, Any]], prefix: str
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return the tensors of a state by name, with a prefix, and the plain data that :func:`restore` needs."""
    tensors: dict[str, torch.Tensor] = {}
    keys = []
    for key, state in states.items():
        names = sorted(name for name, value in state.items() if isinstance(value, torch.Tensor))
        tensors |= {f"{prefix}{key}/{name}": state[name] for name in names}
        numbers = {name: value for name, value in state.items() if name not in names}
        keys.append({"key": key, "tensors": names, "numbers": numbers})
    return tensors, keys


def restore(
    tensors: Mapping[str, torch.Tensor], keys: Sequence[Mapping[str, Any]], prefix: str
) -> dict[Key, dict[str, Any]]:
    """Return the state from the results of :func:`flatten`."""
    return {
        one["key"]: {name: tensors[f"{prefix}{one['key']}/{name}"] for name in one["tensors"]} | one["numbers"]
        for one in keys
    }
