"""The optimizer's state on disk, with what codecs of pushes hold back in each worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.keys import Key
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.checkpoint import collective
from paceline.kvstore.checkpoint.collective import Content
from paceline.kvstore.checkpoint.key_states import flatten, restore
from paceline.kvstore.checkpoint.tensor_file import TensorFile

logger = logging.getLogger(__name__)

KIND = "optimizer states"
States = dict[Key, dict[str, Any]]


def save(
    store: KVStoreBase | None,
    fname: str | os.PathLike[str],
    states: Callable[[], Mapping[Key, Mapping[str, Any]]],
    **manifest: Any,
) -> None:
    """Write the optimizer's state; where a codec keeps residuals every worker calls this, else one is enough.

    Args:
        store: whose codec; None: there is none.
        fname: of the file.
        states: returns the optimizer's state by key.
        **manifest: plain data that describe the optimizer.

    Raises:
        CheckpointError: it cannot be written there; what was there before is unchanged.
    """

    def content() -> Content:
        tensors, keys = flatten(states(), "state/")
        return Content(tensors, {**manifest, "keys": keys})

    if store is None or not store.keeps_residuals:
        collective.save_alone(store, fname, KIND, content())
    else:
        collective.save(store, fname, KIND, content, lambda: residuals_of(store))


def residuals_of(store: KVStoreBase) -> Content:
    """Return what this worker's codec holds back."""
    tensors, keys = flatten(store.codec_states(), "residual/")
    return Content(tensors, {"residuals": keys})


def load(
    store: KVStoreBase | None, fname: str | os.PathLike[str], everywhere: bool, optimizer: str | None = None
) -> tuple[States | None, TensorFile | None]:
    """Read the optimizer's state; every worker calls this.

    Args:
        store: whose codec; None: there is none.
        fname: of the file.
        everywhere: every worker needs the state, not worker 0 alone.
        optimizer: name of the one that is to go on; None: whichever.

    Returns:
        The state by key, if it was read here, and this worker's own part of it for :func:`set_residuals`.

    Raises:
        CheckpointError: a file is missing, damaged, of another save, or something else.
        ValueError: the state is of another optimizer.
    """
    loaded = collective.load(store, fname, KIND, everywhere)
    if loaded.common is None:
        return None, loaded.own
    found = loaded.common.manifest.get("optimizer")
    if optimizer is not None and found != optimizer:
        raise ValueError(f"{os.fspath(fname)!r} holds states of {found!r}, but the optimizer is {optimizer!r}")
    return restore(loaded.common.tensors, loaded.common.manifest["keys"], "state/"), loaded.own


def set_residuals(store: KVStoreBase | None, own: TensorFile | None) -> None:
    """Give this worker's codec its residuals back, if it keeps any; where nothing was saved they become 0.

    Args:
        store: whose codec; None: there is none.
        own: this worker's own part of a checkpoint.

    Raises:
        ValueError: residuals of another model. Nothing is changed then.
    """
    if store is None or not store.keeps_residuals:
        return
    if own is None or "residuals" not in own.manifest:
        logger.warning("worker %d: no residuals were saved for it; its residuals start at 0", store.rank)
        store.set_codec_states({})
        return
    states: dict[Key, dict[str, torch.Tensor]] = restore(own.tensors, own.manifest["residuals"], "residual/")
    store.set_codec_states(states)
