"""Few bits per element, with a scale for every chunk: ``int8`` and ``int4``."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from paceline.compression.base import Codec, CodecState, check_number
from paceline.compression.buffers import Bytes, Floats, float32_parts, floats
from paceline.extensions import register


class LinearCodec(Codec):
    """Linear quantisation to ``-levels`` ... ``levels`` per chunk, with error feedback.

    After Dettmers 2016 (8-bit approximations for parallelism), with linear levels and the scale max|x| / levels of each
    chunk of x = residual + gradient. Layout: one float32 scale per chunk, then the levels of one chunk after the other.
    """

    chunk: int
    levels: ClassVar[int]

    def __post_init__(self) -> None:
        check_number(self.name, "chunk", self.chunk, 8, 1 << 20, int)

    @abc.abstractmethod
    def _level_bytes(self, numel: int) -> int:
        """Return how many bytes the levels of a bucket take."""

    @abc.abstractmethod
    def _check_levels(self, levels: Bytes, numel: int) -> None:
        """Raise ProtocolError when some levels are never sent."""

    def encoded_nbytes(self, numel: int) -> int:
        """Return the bytes of all levels, and four per chunk begun."""
        return 4 * self._chunks(numel) + self._level_bytes(numel)

    def _chunks(self, numel: int) -> int:
        return -(-numel // self.chunk)

    def _split(self, payload: Bytes, numel: int) -> tuple[Floats, Bytes]:
        end_of_scales = 4 * self._chunks(numel)
        return floats(payload[:end_of_scales]), payload[end_of_scales:]

    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        from paceline.compression.kernels import chunks

        encode = chunks.ENCODE[self.levels]
        residual = state.residual_array()
        scales, levels = self._split(payload, grad.numel())
        dropped = 0
        for start, part in float32_parts(grad, multiple_of=self.chunk):
            end, first = start + len(part), start // self.chunk
            of_part = scales[first : first + self._chunks(len(part))]
            here = levels[self._level_bytes(start) : self._level_bytes(end)]
            dropped += encode(part, residual[start:end], self.chunk, of_part, here)
        return dropped

    def _check_content(self, payload: Bytes, numel: int) -> None:
        scales, levels = self._split(payload, numel)
        with np.errstate(over="ignore", invalid="ignore"):
            usable = (scales >= 0) & np.isfinite(scales * np.float32(self.levels))
        if not usable.all():
            raise self._refuse("a scale is negative, too large or not a number", numel)
        self._check_levels(levels, numel)

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        from paceline.compression.kernels import chunks

        scales, levels = self._split(payload, out.numel())
        chunks.DECODE[self.levels](scales, levels, self.chunk, out.numpy())

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        from paceline.compression.kernels import chunks

        scales, levels = self._split(payload, out.numel())
        chunks.DECODE_ADD[self.levels](scales, levels, self.chunk, np.float32(alpha), out.numpy())


@register("codec")
@dataclass(frozen=True)
class Int8(LinearCodec):
    """A byte per element: -127 ... 127 times the scale of its chunk. About 4 times smaller.

    Attributes:
        chunk: elements that share a scale.
    """

    chunk: int = 1024

    name: ClassVar[str] = "int8"
    levels: ClassVar[int] = 127

    def _level_bytes(self, numel: int) -> int:
        return numel

    def _check_levels(self, levels: Bytes, numel: int) -> None:
        if levels.view(np.int8).min() < -self.levels:
            raise self._refuse("it has level -128, which is never sent", numel)


@register("codec")
@dataclass(frozen=True)
class Int4(LinearCodec):
    """Half a byte per element: -7 ... 7 times the scale of its chunk. About 7.5 times smaller.

    A level is sent as level + 8. Byte i of a chunk of n elements has element i in its upper half, and element
    i + n // 2, rounded up, in its lower one, or 0 after the last element: both halves of a chunk are contiguous.

    Attributes:
        chunk: elements that share a scale; an even number.
    """

    chunk: int = 128

    name: ClassVar[str] = "int4"
    levels: ClassVar[int] = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk % 2:
            raise ValueError(f"chunk of codec 'int4' is {self.chunk}; it must be even")

    def _level_bytes(self, numel: int) -> int:
        return (numel + 1) // 2

    def _check_levels(self, levels: Bytes, numel: int) -> None:
        has_padding = numel % 2
        if has_padding and levels[-1] & 0x0F:
            raise self._refuse("the bits after the last element are not 0", numel)
        lower = levels[: len(levels) - has_padding] & 0x0F
        if levels.min() < 0x10 or (len(lower) and lower.min() == 0):
            raise self._refuse("it has level -8, which is never sent", numel)
