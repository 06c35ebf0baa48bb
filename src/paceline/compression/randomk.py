"""Random elements that all workers agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.compression.base import Codec
from paceline.compression.buffers import Bytes, floats
from paceline.compression.codec_parameters import check_number
from paceline.compression.state import CodecState
from paceline.compression.topk import DEFAULT_RATIO, kept
from paceline.extensions import register

_HEADER_BYTES = 16


@register("codec")
@dataclass(frozen=True)
class RandomK(Codec):
    """A random fraction of the elements; the rest waits in the residual (Stich et al. 2018).

    Both sides derive the indices from (seed, round, numel), one from each of k equal strata, so that only values
    travel. Workers that give the same ``seed`` and ``round`` send the same elements: the float32 values after the
    header may then be summed as they are, by an all-reduce for example. Values are not scaled up: the residual makes
    up for elements that are not sent. Layout: seed and round as uint64, then k float32 values.

    Attributes:
        ratio: fraction of the elements that is sent, rounded up.
    """

    ratio: float = DEFAULT_RATIO

    name: ClassVar[str] = "randomk"

    def __post_init__(self) -> None:
        check_number(self.name, "ratio", self.ratio, 1e-9, 1.0)

    def encoded_nbytes(self, numel: int) -> int:
        """Return 16 bytes and four per element sent; nothing for an empty bucket.

        Raises:
            ValueError: more elements than an index of 32 bits can tell apart.
        """
        if numel > 2**32:
            raise ValueError(f"a bucket of {numel} elements is too large for {self.name}; split it")
        return _HEADER_BYTES + 4 * kept(self.ratio, numel) if numel else 0

    def indices(self, numel: int, *, round: int, seed: int) -> NDArray[np.uint32]:
        """Return which elements of a bucket travel in a round, ascending: uint32 of shape (k,)."""
        from paceline.compression.kernels import sparse_kernels

        chosen = np.empty(kept(self.ratio, numel), np.uint32)
        if numel:
            sparse_kernels.draw(np.uint64(seed), np.uint64(round), numel, chosen)
        return chosen

    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        from paceline.compression.kernels import sparse_kernels

        dropped, residual = state.accumulate(grad), state.residual_array()
        payload[:_HEADER_BYTES].view(np.uint64)[:] = seed, round
        sparse_kernels.take(
            residual, self.indices(len(residual), round=round, seed=seed), floats(payload[_HEADER_BYTES:])
        )
        return dropped

    def _check_content(self, payload: Bytes, numel: int) -> None:
        if not np.isfinite(floats(payload[_HEADER_BYTES:])).all():
            raise self._refuse("a value is not finite", numel)

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        out.zero_()
        self._decode_add(payload, out, 1.0)

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        from paceline.compression.kernels import sparse_kernels

        seed, round_ = np.require(payload[:_HEADER_BYTES].view(np.uint64), requirements="A").tolist()
        indices = self.indices(out.numel(), round=round_, seed=seed)
        sparse_kernels.scatter_add(indices, floats(payload[_HEADER_BYTES:]), np.float32(alpha), out.numpy())
