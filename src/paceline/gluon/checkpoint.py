"""Models on disk: safetensors with a manifest in the header."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import PacelineError
from paceline.kvstore.whole_file import save_whole

_FORMAT = "paceline model 1"


def model_path(prefix: str | os.PathLike[str], epoch: int) -> Path:
    """Return where the model of an epoch lies: ``<prefix>-0007.safetensors``."""
    return Path(f"{os.fspath(prefix)}-{epoch:04d}.safetensors")


def states_path(prefix: str | os.PathLike[str], epoch: int) -> Path:
    """Return where the optimizer's state of an epoch lies: ``<prefix>-0007.states``."""
    return Path(f"{os.fspath(prefix)}-{epoch:04d}.states")


def save_model(path: Path, state: Mapping[str, torch.Tensor], epoch: int) -> None:
    """Write a model's state, replacing the file only when all of it is written.

    Args:
        path: the file.
        state: tensors by name; tied ones are written once per name.
        epoch: epochs trained so far.
    """
    tensors = {name: one.detach().cpu().contiguous().clone() for name, one in state.items()}
    save_whole(path, tensors, {"paceline": json.dumps({"format": _FORMAT, "epoch": epoch})})


def load_model(path: Path) -> dict[str, torch.Tensor]:
    """Read what :func:`save_model` wrote.

    Raises:
        FileNotFoundError: no such checkpoint; the message names those there are.
        PacelineError: damaged, or something else.
    """
    if not path.is_file():
        stem = path.name.rsplit("-", 1)[0]
        there = sorted(one.name for one in path.parent.glob(f"{stem}-*.safetensors"))
        raise FileNotFoundError(
            f"there is no checkpoint {path}; there are {', '.join(there) or 'none with this prefix'}"
        )
    try:
        with safe_open(path, framework="pt") as file:
            if json.loads((file.metadata() or {})["paceline"])["format"] != _FORMAT:
                raise KeyError("format")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PacelineError(f"{path} is damaged or holds no model ({error})") from error
