"""One bit per element: the sign, with error feedback."""

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

    def _kernel(self) -> Callable[..., Any]:
        from paceline.compression.kernels import onebit_kernels

        return onebit_kernels.encode

    def _table(self, alpha: float) -> Floats:
        return byte_table((-alpha, alpha), bits=1)
