"""Common parts of the codecs that put several elements into a byte."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from paceline.compression.base import Codec
from paceline.compression.buffers import Bytes, Floats, float32_parts
from paceline.compression.state import CodecState


class PackedCodec(Codec):
    """Every element becomes a code of 1 or 2 bits; the rest waits in the residual.

    The first element of a byte is in its most significant bits; the last byte is filled with 0.
    """

    threshold: float
    #: Per element.
    bits: ClassVar[int]

    def encoded_nbytes(self, numel: int) -> int:
        """Return a byte for every eight bits begun."""
        return (self.bits * numel + 7) // 8

    @abc.abstractmethod
    def _kernel(self) -> Callable[..., Any]:
        """Import and return the kernel that encodes."""

    @abc.abstractmethod
    def _table(self, alpha: float) -> Floats:
        """Return ``alpha`` times the values of each byte, float32 of shape (256, 8 // bits)."""

    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        encode, per_byte = self._kernel(), 8 // self.bits
        residual, threshold = state.residual_array(), np.float32(self.threshold)
        return sum(
            encode(part, residual[start : start + len(part)], threshold, payload[start // per_byte :])
            for start, part in float32_parts(grad, multiple_of=per_byte)
        )

    def _check_content(self, payload: Bytes, numel: int) -> None:
        padding = -numel * self.bits % 8
        if payload[-1] & ((1 << padding) - 1):
            raise self._refuse("the bits after the last element are not 0", numel)

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        from paceline.compression.kernels import packed_kernels

        packed_kernels.decode(payload, self._table(1.0), out.numpy())

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        from paceline.compression.kernels import packed_kernels

        packed_kernels.decode_add(payload, self._table(alpha), out.numpy())
