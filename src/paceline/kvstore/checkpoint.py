"""Optimizer state on disk: one safetensors file with a manifest, per key, independent of the number of servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.errors import DataError
from paceline.kvstore.base import Key

FORMAT = "paceline optimizer states 1"


def save(fname: str | Path, states: Mapping[Key, Mapping[str, torch.Tensor]], extra: Mapping[str, Any]) -> None:
    """Write the state of keys; the file appears whole or not at all.

    Args:
        fname: path of the file.
        states: per key, named tensors.
        extra: plain data to keep with it.
    """
    tensors, manifest = {}, []
    for number, (key, state) in enumerate(states.items()):
        for name, tensor in state.items():
            tensors[f"{number}/{name}"] = tensor.contiguous().clone()
        manifest.append({"key": key, "state": sorted(state)})
    metadata = {"format": FORMAT, "manifest": json.dumps({"keys": manifest, **extra})}
    path = Path(fname)
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata)
    part.replace(path)


def load(fname: str | Path) -> dict[Key, dict[str, torch.Tensor]]:
    """Read the state of keys.

    Raises:
        DataError: not such a file, or damaged.
    """
    try:
        with safe_open(fname, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise DataError(f"{fname} holds no optimizer states of paceline (format {metadata.get('format')!r})")
            keys = json.loads(metadata["manifest"])["keys"]
            return {
                one["key"]: {name: file.get_tensor(f"{number}/{name}") for name in one["state"]}
                for number, one in enumerate(keys)
            }
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{fname} cannot be read as optimizer states: {error}") from error
