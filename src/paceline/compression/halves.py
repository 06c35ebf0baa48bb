"""Half-precision casts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from paceline.compression.base import Bytes, Codec, State
from paceline.compression.registry import register

#: Elements that are cast at once; their copies stay in the L2 cache.
_CHUNK = 1 << 15


class _Half(Codec):
    """Every element is cast, rounded to nearest even; finite values out of range saturate, inf and NaN stay."""

    uses_residual: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype]

    def encoded_nbytes(self, numel: int) -> int:
        """Return two bytes per element."""
        return 2 * numel

    def _encode(self, grad: torch.Tensor, state: State, payload: Bytes, round: int, seed: int) -> int:
        halves = torch.from_numpy(payload.view(np.int16)).view(self.dtype)
        for part, out in zip(torch.split(grad, _CHUNK), torch.split(halves, _CHUNK), strict=True):
            out.copy_(self._saturated(part))
        return 0

    def _saturated(self, part: torch.Tensor) -> torch.Tensor:
        largest = torch.finfo(self.dtype).max
        if part.dtype == self.dtype:
            return part
        low, high = torch.aminmax(part)
        if -largest <= low and high <= largest:
            return part
        return torch.where(part.isinf(), part, part.clamp(-largest, largest))

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        for part, halves in self._parts(payload, out):
            part.copy_(halves)

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        values = torch.empty(min(_CHUNK, out.numel()))
        for part, halves in self._parts(payload, out):
            part.add_(values[: part.numel()].copy_(halves), alpha=alpha)

    def _parts(self, payload: Bytes, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of ``out`` with their halves, copied because torch wants writable and aligned memory."""
        buffer = np.empty(min(2 * _CHUNK, len(payload)), np.uint8)
        halves = torch.from_numpy(buffer.view(np.int16)).view(self.dtype)
        for start, part in zip(range(0, len(payload), 2 * _CHUNK), torch.split(out, _CHUNK), strict=True):
            buffer[: 2 * part.numel()] = payload[start : start + 2 * part.numel()]
            yield part, halves[: part.numel()]


@register
@dataclass(frozen=True)
class Float16(_Half):
    """IEEE half precision: 11 bits of mantissa, 6e-8 to 65504."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


@register
@dataclass(frozen=True)
class BFloat16(_Half):
    """The upper half of a float32: 8 bits of mantissa, float32's range."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
