"""State of keys on disk: one safetensors file with a manifest, independent of the number of servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import DataError
from paceline.kvstore.base import Key
from paceline.kvstore.whole_file import save_whole

FORMAT = "paceline optimizer states 1"


def save(
    fname: str | Path,
    states: Mapping[Key, Mapping[str, torch.Tensor]],
    extra: Mapping[str, Any],
    format: str = FORMAT,
) -> None:
    """Write the state of keys; the file appears whole or not at all.

    Args:
        fname: path of the file.
        states: per key, named tensors.
        extra: plain data to keep with it.
        format: what the file says that it is.
    """
    tensors, manifest = {}, []
    for number, (key, state) in enumerate(states.items()):
        for name, tensor in state.items():
            tensors[f"{number}/{name}"] = tensor.contiguous().clone()
        manifest.append({"key": key, "state": sorted(state)})
    metadata = {"format": format, "manifest": json.dumps({"keys": manifest, **extra})}
    save_whole(Path(fname), tensors, metadata)


def load(fname: str | Path, format: str = FORMAT) -> dict[Key, dict[str, torch.Tensor]]:
    """Read the state of keys.

    Args:
        fname: path of the file.
        format: what it must be.

    Raises:
        DataError: not such a file, or damaged.
    """
    try:
        with safe_open(fname, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != format:
                raise DataError(f"{fname} is not a file of {format!r}, but of {metadata.get('format')!r}")
            keys = json.loads(metadata["manifest"])["keys"]
            return {
                one["key"]: {name: file.get_tensor(f"{number}/{name}") for name in one["state"]}
                for number, one in enumerate(keys)
            }
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError(f"{fname} cannot be read as {format!r}: {error}") from error
