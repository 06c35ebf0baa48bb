"""The flat buffers of codecs: gradients as float32 arrays, payloads as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Payload: TypeAlias = memoryview | bytes | bytearray | Bytes

GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Half-precision gradients are converted this many elements at a time, which stay in the L2 cache.
_CONVERTED_AT_ONCE = 1 << 16


def check_flat(tensor: torch.Tensor, name: str) -> None:
    """Raise ValueError unless a tensor is flat, contiguous and on the CPU."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} on {tensor.device}; "
            "codecs work on flat contiguous CPU tensors"
        )


def float32_parts(grad: torch.Tensor, multiple_of: int = 1) -> Iterator[tuple[int, Floats]]:
    """Yield a gradient as (start, float32 array): whole, or in converted chunks if it has half precision.

    Args:
        grad: flat gradient.
        multiple_of: chunks other than the last have a multiple of this many elements.
    """
    if grad.dtype == torch.float32:
        yield 0, grad.numpy()
        return
    size = max(1, _CONVERTED_AT_ONCE // multiple_of) * multiple_of
    buffer = torch.empty(min(size, grad.numel()), dtype=torch.float32, device="cpu")
    for start in range(0, grad.numel(), size):
        part = grad[start : start + size]
        yield start, buffer[: part.numel()].copy_(part).numpy()


def floats(payload: Bytes) -> Floats:
    """Return bytes as float32, without a copy where their address allows it."""
    view: Floats = np.require(payload.view(np.float32), requirements="A")
    return view
