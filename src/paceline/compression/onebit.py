"""One bit per element: the sign, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from paceline.compression.base import Codec
from paceline.compression.buffers import Bytes, Floats, float32_parts
from paceline.compression.parameters import check_number
from paceline.compression.registry import register
from paceline.compression.state import State
from paceline.compression.tables import byte_table


@register
@dataclass(frozen=True)
class OneBit(Codec):
    """Every element becomes +1 or -1; the rest waits in the residual. 32 times smaller.

    The method and the layout are MXNet's 1bit (after Seide et al. 2014): with x = residual + gradient, bit 1 (+1) if
    x > threshold, else bit 0 (-1). Eight elements share a byte, the first in its most significant bit; the last byte is
    filled with 0. Made for gradients of sums over samples, or for a learning rate to match: every element moves by 1.

    Attributes:
        threshold: float, of any sign, used as float32.
    """

    threshold: float = 0.0

    name: ClassVar[str] = "1bit"

    def __post_init__(self) -> None:
        largest = float(np.finfo(np.float32).max)
        check_number(self.name, "threshold", self.threshold, -largest, largest)

    def encoded_nbytes(self, numel: int) -> int:
        """Return a byte for every eight elements begun."""
        return (numel + 7) // 8

    def _encode(self, grad: torch.Tensor, state: State, payload: Bytes, round: int, seed: int) -> int:
        from paceline.compression.kernels import onebit

        residual, threshold = state.residual_array(), np.float32(self.threshold)
        return sum(
            onebit.encode(part, residual[start : start + len(part)], threshold, payload[start // 8 :])
            for start, part in float32_parts(grad, multiple_of=8)
        )

    def _check_content(self, payload: Bytes, numel: int) -> None:
        padding = -numel % 8
        if payload[-1] & ((1 << padding) - 1):
            raise self._refuse("the bits after the last element are not 0", numel)

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        from paceline.compression.kernels import onebit

        onebit.decode(payload, _table(1.0), out.numpy())

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        from paceline.compression.kernels import onebit

        onebit.decode_add(payload, _table(alpha), out.numpy())


def _table(alpha: float) -> Floats:
    return byte_table((-alpha, alpha), bits=1)
