"""MXNet's 2-bit gradient compression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paceline.compression.buffers import Floats
from paceline.compression.codec_parameters import check_number
from paceline.compression.packed import PackedCodec
from paceline.compression.tables import byte_table
from paceline.extensions import register


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

    def _kernel(self) -> Callable[..., Any]:
        from paceline.compression.kernels import twobit_kernels

        return twobit_kernels.encode

    def _table(self, alpha: float) -> Floats:
        sent = float(np.float32(alpha) * np.float32(self.threshold))
        return byte_table((0.0, 0.0, -sent, sent), bits=2)
