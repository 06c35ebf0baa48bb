"""Files of a ``Module``'s model, and of the optimizer's state beside it."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.errors import CheckpointError, CheckpointNotFoundError
from paceline.kvstore.checkpoint import optimizer_states, tensor_file

_KIND = "model"


def model_path(prefix: str | os.PathLike[str], epoch: int) -> Path:
    """Return the path of an epoch's model: ``<prefix>-0007.safetensors``."""
    return Path(f"{os.fspath(prefix)}-{epoch:04d}.safetensors")


def states_path(prefix: str | os.PathLike[str], epoch: int) -> Path:
    """Return the path of an epoch's optimizer state: ``<prefix>-0007.states``."""
    return Path(f"{os.fspath(prefix)}-{epoch:04d}.states")


def save_model(path: Path, state: Mapping[str, torch.Tensor], epoch: int, states: Path | None = None) -> None:
    """Write a model's state, tied tensors once per name; the file is replaced only when all of it is written.

    Raises:
        CheckpointError: the file cannot be written; an old file is unchanged.
    """
    digest = None if states is None else _digest_of(states)
    tensor_file.write(path, _KIND, state, {"epoch": epoch, "states": digest})


def load_model(path: Path, states: Path | None = None) -> dict[str, torch.Tensor]:
    """Read a file of :func:`save_model`, with which the optimizer's ``states`` must have been saved.

    Raises:
        CheckpointNotFoundError: no such checkpoint; the message names the existing ones.
        CheckpointError: the file is damaged, is not a checkpoint, or belongs to another save than ``states``.
    """
    if not path.is_file():
        stem = path.name.rsplit("-", 1)[0]
        there = sorted(one.name for one in path.parent.glob(f"{glob.escape(stem)}-*.safetensors"))
        raise CheckpointNotFoundError(
            f"there is no checkpoint {path}; there are {', '.join(there) or 'none with this prefix'}"
        )
    if states is not None and not states.is_file():
        raise CheckpointNotFoundError(f"there is no {states}; save with save_optimizer_states=True")
    found = tensor_file.read(path, _KIND)
    if states is not None and found.manifest.get("states") != _digest_of(states):
        raise CheckpointError(f"{states} was not saved together with {path}: they belong to different saves")
    return found.tensors


def _digest_of(states: Path) -> str:
    return tensor_file.read(states, optimizer_states.KIND, with_tensors=False).digest
