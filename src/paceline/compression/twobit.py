"""MXNet's 2-bit gradient compression."""

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
class TwoBit(Codec):
    """Every element becomes ``+threshold``, 0 or ``-threshold``; the rest waits in the residual. 16 times smaller.

    The method and the layout are MXNet's (``kv.set_gradient_compression``, after Strom 2015): with x = residual +
    gradient, code 11 if x >= threshold, 10 if x <= -threshold, else 00. Four elements share a byte, the first in its
    two most significant bits; the last byte is filled with 00. Code 01 decodes to 0.

    Attributes:
        threshold: float, positive, used as float32.
    """

    threshold: float = 0.5

    name: ClassVar[str] = "2bit"

    def __post_init__(self) -> None:
        info = np.finfo(np.float32)
        check_number(self.name, "threshold", self.threshold, float(info.tiny), float(info.max))

    def encoded_nbytes(self, numel: int) -> int:
        """Return a byte for every four elements begun."""
        return (numel + 3) // 4

    def _encode(self, grad: torch.Tensor, state: State, payload: Bytes, round: int, seed: int) -> int:
        from paceline.compression.kernels import twobit

        residual, threshold = state.residual_array(), np.float32(self.threshold)
        return sum(
            twobit.encode(part, residual[start : start + len(part)], threshold, payload[start // 4 :])
            for start, part in float32_parts(grad, multiple_of=4)
        )

    def _check_content(self, payload: Bytes, numel: int) -> None:
        padding = 2 * (-numel % 4)
        if payload[-1] & ((1 << padding) - 1):
            raise self._refuse("the codes after the last element are not 0", numel)

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        from paceline.compression.kernels import twobit

        twobit.decode(payload, self._table(1.0), out.numpy())

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        from paceline.compression.kernels import twobit

        twobit.decode_add(payload, self._table(alpha), out.numpy())

    def _table(self, alpha: float) -> Floats:
        sent = float(np.float32(alpha) * np.float32(self.threshold))
        return byte_table((0.0, 0.0, -sent, sent), bits=2)
