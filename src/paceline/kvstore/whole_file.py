"""Files that appear whole or not at all."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_whole(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file beside its place, and put it there when it is complete.

    Several workers may write the same file: each has a name of its own until then, and the last one stays.

    Args:
        path: of the file.
        tensors: contiguous CPU tensors that share no memory.
        metadata: of the file's header.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        save_file(dict(tensors), partial, dict(metadata))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
