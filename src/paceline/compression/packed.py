"""One or two bits per element, with error feedback: several elements share a byte."""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from paceline.compression.base import Codec, CodecState, check_number
from paceline.compression.buffers import Bytes, Floats, float32_parts
from paceline.extensions import register


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
    def _table(self, alpha: float) -> Floats:
        """Return ``alpha`` times the values of each byte, float32 of shape (256, 8 // bits)."""

    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        from paceline.compression.kernels import bits

        encode, per_byte = bits.encode_two if self.bits == 2 else bits.encode_one, 8 // self.bits
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
        from paceline.compression.kernels import bits

        bits.decode(payload, self._table(1.0), out.numpy())

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        from paceline.compression.kernels import bits

        bits.decode_add(payload, self._table(alpha), out.numpy())


@register("codec")
@dataclass(frozen=True)
class TwoBit(PackedCodec):
    """Every element becomes ``+threshold``, 0 or ``-threshold``; the rest waits in the residual. 16 times smaller.

    The method and the layout are MXNet's (``kv.set_gradient_compression``, after Strom 2015): with x = residual +
    gradient, code 11 if x >= threshold, 10 if x <= -threshold, else 00. Four elements share a byte. Code 01 decodes
    to 0.

    Attributes:
        threshold: float, positive, used as float32.
    """

    threshold: float = 0.5

    name: ClassVar[str] = "2bit"
    bits: ClassVar[int] = 2

    def __post_init__(self) -> None:
        info = np.finfo(np.float32)
        check_number(self.name, "threshold", self.threshold, float(info.tiny), float(info.max))

    def _table(self, alpha: float) -> Floats:
        sent = float(np.float32(alpha) * np.float32(self.threshold))
        return byte_table((0.0, 0.0, -sent, sent), bits=2)


@register("codec")
@dataclass(frozen=True)
class OneBit(PackedCodec):
    """Every element becomes +1 or -1; the rest waits in the residual. 32 times smaller.

    The method and the layout are MXNet's 1bit (after Seide et al. 2014): with x = residual + gradient, bit 1 (+1) if
    x > threshold, else bit 0 (-1). Eight elements share a byte. Made for gradients of sums over samples, or for a
    learning rate to match: every element moves by 1.

    Attributes:
        threshold: float, of any sign, used as float32.
    """

    threshold: float = 0.0

    name: ClassVar[str] = "1bit"
    bits: ClassVar[int] = 1

    def __post_init__(self) -> None:
        largest = float(np.finfo(np.float32).max)
        check_number(self.name, "threshold", self.threshold, -largest, largest)

    def _table(self, alpha: float) -> Floats:
        return byte_table((-alpha, alpha), bits=1)


@functools.lru_cache(maxsize=64)
def byte_table(values: tuple[float, ...], bits: int) -> Floats:
    """Return the values of each byte.

    Args:
        values: the value of each code of ``bits`` bits.
        bits: 1, 2 or 4; the first element of a byte is in its most significant bits.

    Returns:
        Read-only float32 of shape (256, 8 // bits).
    """
    shifts = np.arange(8 - bits, -1, -bits)
    codes = (np.arange(256)[:, None] >> shifts) & ((1 << bits) - 1)
    table: Floats = np.array(values, np.float32)[codes]
    table.setflags(write=False)
    return table
