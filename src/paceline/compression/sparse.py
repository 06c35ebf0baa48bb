"""Some of the elements: the largest, or random ones that all workers agree on. The rest waits in the residual."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.compression.base import Codec, CodecState, check_number
from paceline.compression.buffers import Bytes, Floats, float32_parts, floats
from paceline.extensions import register

_MOST_ELEMENTS = 2**32
_RATIO = 0.01
_HEADER_BYTES = 16


class SparseCodec(Codec):
    """Some elements of a bucket, with error feedback."""

    def _most(self, numel: int) -> int:
        """Return the number of elements, if an index of 32 bits can tell them apart.

        Raises:
            ValueError: there are more.
        """
        if numel > _MOST_ELEMENTS:
            raise ValueError(f"a bucket of {numel} elements is too large for {self.name}; split it")
        return numel

    @abc.abstractmethod
    def _parts(self, payload: Bytes, numel: int) -> tuple[NDArray[np.uint32], Floats]:
        """Return the indices and the values of a payload."""

    def _check_values(self, values: Floats, numel: int) -> None:
        if not np.isfinite(values).all():
            raise self._refuse("a value is not finite", numel)

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        from paceline.compression.kernels import selection

        indices, values = self._parts(payload, out.numel())
        selection.scatter_add(indices, values, np.float32(alpha), out.numpy())


@register("codec")
@dataclass(frozen=True)
class TopK(SparseCodec):
    """The k elements of largest magnitude; the rest waits in the residual (Stich et al. 2018, Lin et al. 2018).

    The selection is exact; among equals the lower index wins. Encoding reads the bucket three times. Layout: k uint32
    indices in ascending order, then k float32 values.

    Attributes:
        ratio: fraction of the elements that is sent, rounded up; 0.01 unless ``k`` is given.
        k: number of elements to send, all of a smaller bucket.
    """

    ratio: float | None = None
    k: int | None = None

    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        if self.ratio is not None and self.k is not None:
            raise ValueError(f"codec 'topk' takes ratio or k, not both (ratio={self.ratio!r}, k={self.k!r})")
        if self.k is not None:
            check_number(self.name, "k", self.k, 1, _MOST_ELEMENTS, int)
            return
        if self.ratio is None:
            object.__setattr__(self, "ratio", _RATIO)
        check_number(self.name, "ratio", self.ratio, 1e-9, 1.0)

    def encoded_nbytes(self, numel: int) -> int:
        """Return eight bytes per element sent.

        Raises:
            ValueError: more elements than an index of 32 bits can tell apart.
        """
        return 8 * self._count(numel)

    def _count(self, numel: int) -> int:
        if self.k is not None:
            return min(self.k, self._most(numel))
        assert self.ratio is not None
        return _kept(self.ratio, self._most(numel))

    def _parts(self, payload: Bytes, numel: int) -> tuple[NDArray[np.uint32], Floats]:
        half = len(payload) // 2
        indices = np.require(payload[:half].view(np.uint32), requirements="A")
        return indices, floats(payload[half:])

    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        from paceline.compression.kernels import magnitude, selection

        residual = state.residual_array()
        indices, values = self._parts(payload, grad.numel())
        high_counts = np.zeros(selection.HIGH_BINS, np.int64)
        dropped: int = sum(
            selection.accumulate_and_count(part, residual[start : start + len(part)], high_counts)
            for start, part in float32_parts(grad)
        )
        high, wanted = selection.last_bin(high_counts, len(indices))
        low_counts = np.zeros(selection.LOW_BINS, np.int64)
        selection.count_low(residual, high, low_counts)
        low, ties = selection.last_bin(low_counts, wanted)
        magnitude.take_indices(residual, high << 16 | low, ties, indices)
        selection.take(residual, indices, values)
        return dropped

    def _check_content(self, payload: Bytes, numel: int) -> None:
        from paceline.compression.kernels import selection

        indices, values = self._parts(payload, numel)
        if not selection.ascending_below(indices, numel):
            raise self._refuse("its indices are out of range or not in ascending order", numel)
        self._check_values(values, numel)


@register("codec")
@dataclass(frozen=True)
class RandomK(SparseCodec):
    """A random fraction of the elements; the rest waits in the residual (Stich et al. 2018).

    Both sides derive the indices from (seed, round, numel), one from each of k equal strata, so that only values
    travel. Workers that give the same ``seed`` and ``round`` send the same elements: the float32 values after the
    header may then be summed as they are, by an all-reduce for example. Values are not scaled up: the residual makes
    up for the elements that are not sent. Layout: seed and round as uint64, then k float32 values.

    Attributes:
        ratio: fraction of the elements that is sent, rounded up.
    """

    ratio: float = _RATIO

    name: ClassVar[str] = "randomk"

    def __post_init__(self) -> None:
        check_number(self.name, "ratio", self.ratio, 1e-9, 1.0)

    def encoded_nbytes(self, numel: int) -> int:
        """Return 16 bytes and four per element sent; nothing for an empty bucket.

        Raises:
            ValueError: more elements than an index of 32 bits can tell apart.
        """
        return _HEADER_BYTES + 4 * _kept(self.ratio, self._most(numel)) if numel else 0

    def indices(self, numel: int, *, round: int, seed: int) -> NDArray[np.uint32]:
        """Return which elements of a bucket travel in a round, ascending: uint32 of shape (k,)."""
        from paceline.compression.kernels import selection

        chosen = np.empty(_kept(self.ratio, numel), np.uint32)
        if numel:
            selection.draw(np.uint64(seed), np.uint64(round), numel, chosen)
        return chosen

    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        from paceline.compression.kernels import selection

        dropped, residual = state.accumulate(grad), state.residual_array()
        payload[:_HEADER_BYTES].view(np.uint64)[:] = seed, round
        selection.take(residual, self.indices(len(residual), round=round, seed=seed), floats(payload[_HEADER_BYTES:]))
        return dropped

    def _check_content(self, payload: Bytes, numel: int) -> None:
        self._check_values(floats(payload[_HEADER_BYTES:]), numel)

    def _parts(self, payload: Bytes, numel: int) -> tuple[NDArray[np.uint32], Floats]:
        seed, round_ = np.require(payload[:_HEADER_BYTES].view(np.uint64), requirements="A").tolist()
        return self.indices(numel, round=round_, seed=seed), floats(payload[_HEADER_BYTES:])


def _kept(ratio: float, numel: int) -> int:
    """Return how many of ``numel`` elements a ratio keeps: rounded up, so at least one of any bucket."""
    return min(numel, math.ceil(ratio * numel))
