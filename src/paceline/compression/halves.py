"""Half-precision casts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from paceline.compression.base import Codec, CodecState
from paceline.compression.buffers import Bytes
from paceline.extensions import register

#: Elements that are cast at once; both forms stay in the L2 cache.
_CHUNK = 1 << 16


class _Half(Codec):
    """Every element is cast, rounded to nearest even; finite values out of range saturate, inf and NaN stay."""

    uses_residual: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype]
    #: Bit pattern of infinity.
    infinity: ClassVar[int]

    def encoded_nbytes(self, numel: int) -> int:
        """Return two bytes per element."""
        return 2 * numel

    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        from paceline.compression.kernels import magnitude

        out = torch.from_numpy(payload.view(np.int16))
        for part, patterns in zip(torch.split(grad, _CHUNK), torch.split(out, _CHUNK), strict=True):
            patterns.view(self.dtype).copy_(part)
            if magnitude.largest_pattern(patterns.numpy()) >= self.infinity:
                whole, largest = part.float(), torch.finfo(self.dtype).max
                patterns.view(self.dtype).copy_(torch.where(part.isinf(), whole, whole.clamp(-largest, largest)))
        return 0

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        out.copy_(self._tensor(payload))

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        values = torch.empty(min(_CHUNK, out.numel()), dtype=torch.float32, device="cpu")
        for part, halves in zip(torch.split(out, _CHUNK), torch.split(self._tensor(payload), _CHUNK), strict=True):
            part.add_(values[: part.numel()].copy_(halves), alpha=alpha)

    def _tensor(self, payload: Bytes) -> torch.Tensor:
        """Return a payload as a tensor without a copy, valid while the payload lives.

        Torch has no read-only tensors and warns about read-only memory; nothing here writes to it.
        """
        patterns = np.require(payload.view(np.int16), requirements="A")
        if patterns.flags.writeable:
            return torch.from_numpy(patterns).view(self.dtype)
        memory = (ctypes.c_int16 * len(patterns)).from_address(patterns.ctypes.data)
        return torch.frombuffer(memory, dtype=self.dtype)


@register("codec")
@dataclass(frozen=True)
class Float16(_Half):
    """IEEE half precision: 11 bits of mantissa, 6e-8 to 65504."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16
    infinity: ClassVar[int] = 0x7C00


@register("codec")
@dataclass(frozen=True)
class BFloat16(_Half):
    """The upper half of a float32: 8 bits of mantissa, float32's range."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    infinity: ClassVar[int] = 0x7F80
