"""The largest elements of every chunk, with values of two bits: less than a bit in six of the elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.compression.base import Codec, CodecState, check_number
from paceline.compression.buffers import Bytes, float32_parts
from paceline.extensions import register

_LEVEL_BYTES = 4


@register("codec")
@dataclass(frozen=True)
class ChunkTopK(Codec):
    """The k largest elements of every chunk, each as one of two magnitudes and a sign. About 195 times smaller.

    For local steps on slow networks (SparseLoCo, Sarfi et al. 2025, arXiv 2508.15706). What is not sent waits in the
    residual, of which each round keeps ``decay``. The selection is exact; among equals the lower index wins. The two
    magnitudes of a chunk are means of the elements below and above the middle of its range, as bf16.

    Layout of a chunk: two bf16; then bits, the lowest of a byte first: the upper bits of the ascending indices as a
    bitmap, where the j-th index with upper bits u sets bit u + j (Elias 1974, Fano 1971); then for each element one
    bit for the higher magnitude, one for the sign, and the lower bits of its index. Ten bits per element by default,
    where an index of 12 bits makes 14. The last chunk sends as many elements in proportion, rounded up.

    Attributes:
        k: elements that a chunk sends.
        chunk: elements of a chunk.
        decay: share of the residual that goes on to the next round.
    """

    k: int = 64
    chunk: int = 4096
    decay: float = 0.95

    name: ClassVar[str] = "chunktopk"

    def __post_init__(self) -> None:
        check_number(self.name, "chunk", self.chunk, 16, 1 << 16, int)
        check_number(self.name, "k", self.k, 1, self.chunk, int)
        check_number(self.name, "decay", self.decay, 0.0, 1.0)

    def encoded_nbytes(self, numel: int) -> int:
        """Return the bytes of all whole chunks and of the last one."""
        _, whole, _, last = self._counts(numel).tolist()
        return int(numel // self.chunk * whole + last)

    @property
    def _shift(self) -> int:
        """Lower bits of an index: as many as make the bitmap about two bits per element."""
        return (self.chunk // self.k).bit_length() - 1

    def _counts(self, numel: int) -> NDArray[np.int64]:
        """Return the elements and the bytes that a whole chunk and the last one send."""
        rest = numel % self.chunk
        last = -(-self.k * rest // self.chunk)
        return np.array([self.k, self._bytes(self.chunk, self.k), last, self._bytes(rest, last)], np.int64)

    def _bytes(self, numel: int, k: int) -> int:
        if not numel:
            return 0
        bitmap = k + ((numel - 1) >> self._shift) + 1
        return _LEVEL_BYTES + (bitmap + k * (self._shift + 2) + 7) // 8

    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        from paceline.compression.kernels import chunk_selection

        residual, counts, decay = state.residual_array(), self._counts(grad.numel()), np.float32(self.decay)
        size, dropped = int(counts[1]), 0
        for start, part in float32_parts(grad, multiple_of=self.chunk):
            here, at = residual[start : start + len(part)], start // self.chunk * size
            dropped += chunk_selection.encode(part, here, self.chunk, self._shift, decay, counts, payload[at:])
        return dropped

    def _check_content(self, payload: Bytes, numel: int) -> None:
        if not self._add(payload, numel, 0.0, np.empty(0, np.float32)):
            raise self._refuse("its magnitudes or its indices are out of range or not in ascending order", numel)

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        self._add(payload, out.numel(), alpha, out.numpy())

    def _add(self, payload: Bytes, numel: int, alpha: float, out: NDArray[np.float32]) -> bool:
        from paceline.compression.kernels import chunk_selection

        sizes = numel, self.chunk, self._shift
        return bool(chunk_selection.decode_add(payload, *sizes, np.float32(alpha), self._counts(numel), out))
