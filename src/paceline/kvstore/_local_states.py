"""Optimizer states on disk: one safetensors file whose header carries the manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import PacelineError
from paceline.kvstore._local_apply import State
from paceline.kvstore.base import Key
from paceline.kvstore.whole_file import save_whole

_FORMAT = "paceline optimizer states 1"


def save_states(fname: str | os.PathLike[str], optimizer: str, groups: Any, states: Mapping[Key, State]) -> None:
    """Write the state of every key, replacing the file only when all of it is written.

    Args:
        fname: path of the file.
        optimizer: name of the optimizer.
        groups: its options per param group, as plain data.
        states: state by key.
    """
    tensors: dict[str, torch.Tensor] = {}
    keys = []
    for index, (key, state) in enumerate(states.items()):
        parts = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        numbers = {name: value for name, value in state.items() if name not in parts}
        tensors |= {f"{index}/{name}": value.detach().cpu().contiguous() for name, value in parts.items()}
        keys.append({"key": key, "tensors": sorted(parts), "numbers": numbers})
    manifest = {"format": _FORMAT, "optimizer": optimizer, "groups": groups, "keys": keys}
    save_whole(Path(fname), tensors, {"paceline": json.dumps(manifest)})


def load_states(fname: str | os.PathLike[str], optimizer: str) -> dict[Key, State]:
    """Read what :func:`save_states` wrote.

    Args:
        fname: path of the file.
        optimizer: name of the optimizer that is to go on.

    Raises:
        FileNotFoundError: no such file.
        PacelineError: the file is damaged or something else.
        ValueError: the states are of another optimizer.
    """
    if not Path(fname).is_file():
        raise FileNotFoundError(f"there is no file {os.fspath(fname)!r} with optimizer states")
    try:
        with safe_open(fname, framework="pt") as file:
            manifest = json.loads((file.metadata() or {})["paceline"])
            if manifest["format"] != _FORMAT:
                raise KeyError(manifest["format"])
            states = {
                entry["key"]: {name: file.get_tensor(f"{index}/{name}") for name in entry["tensors"]} | entry["numbers"]
                for index, entry in enumerate(manifest["keys"])
            }
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PacelineError(f"{os.fspath(fname)!r} is damaged or holds no optimizer states ({error})") from error
    if manifest["optimizer"] != optimizer:
        raise ValueError(
            f"{os.fspath(fname)!r} holds states of {manifest['optimizer']!r}, but the optimizer is {optimizer!r}"
        )
    return states
