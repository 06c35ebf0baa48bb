"""Eight bits per element, with a scale for every chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.compression.base import Codec, CodecState, check_number
from paceline.compression.buffers import Bytes, Floats, float32_parts, floats
from paceline.extensions import register


@register("codec")
@dataclass(frozen=True)
class Int8(Codec):
    """Linear quantisation to -127 ... 127 per chunk, with error feedback. About 4 times smaller.

    After Dettmers 2016 (8-bit approximations for parallelism), with linear levels and the scale max|x| / 127 of each
    chunk of x = residual + gradient. Layout: one float32 scale per chunk, then one int8 per element.

    Attributes:
        chunk: elements that share a scale.
    """

    chunk: int = 1024

    name: ClassVar[str] = "int8"

    def __post_init__(self) -> None:
        check_number(self.name, "chunk", self.chunk, 8, 1 << 20, int)

    def encoded_nbytes(self, numel: int) -> int:
        """Return a byte per element and four per chunk begun."""
        return 4 * self._chunks(numel) + numel

    def _chunks(self, numel: int) -> int:
        return -(-numel // self.chunk)

    def _split(self, payload: Bytes, numel: int) -> tuple[Floats, NDArray[np.int8]]:
        end_of_scales = 4 * self._chunks(numel)
        return floats(payload[:end_of_scales]), payload[end_of_scales:].view(np.int8)

    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        from paceline.compression.kernels import chunks

        residual = state.residual_array()
        scales, levels = self._split(payload, grad.numel())
        dropped = 0
        for start, part in float32_parts(grad, multiple_of=self.chunk):
            here = slice(start, start + len(part))
            first = start // self.chunk
            of_part = scales[first : first + self._chunks(len(part))]
            dropped += chunks.encode(part, residual[here], self.chunk, of_part, levels[here])
        return dropped

    def _check_content(self, payload: Bytes, numel: int) -> None:
        scales, levels = self._split(payload, numel)
        with np.errstate(over="ignore", invalid="ignore"):
            usable = (scales >= 0) & np.isfinite(scales * np.float32(127))
        if not usable.all():
            raise self._refuse("a scale is negative, too large or not a number", numel)
        if levels.min() < -127:
            raise self._refuse("it has level -128, which is never sent", numel)

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        from paceline.compression.kernels import chunks

        scales, levels = self._split(payload, out.numel())
        chunks.decode(scales, levels, self.chunk, out.numpy())

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        from paceline.compression.kernels import chunks

        scales, levels = self._split(payload, out.numel())
        chunks.decode_add(scales, levels, self.chunk, np.float32(alpha), out.numpy())
