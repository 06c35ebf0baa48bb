"""Low-rank gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from paceline.compression.base import Codec, CodecState, check_number
from paceline.compression.buffers import Bytes, Floats, floats
from paceline.extensions import register


class _Shape(NamedTuple):
    """How a bucket is laid out: a matrix of rows x cols, then ``tail`` elements that travel as they are."""

    rows: int
    cols: int
    rank: int
    tail: int

    @property
    def nbytes(self) -> int:
        return 4 * (self.rank * (self.rows + self.cols) + self.tail)


class _Factors(NamedTuple):
    """The parts of a payload, transposed so that BLAS reads M in order: P (rank, rows), Q (rank, cols), the tail."""

    p: Floats
    q: Floats
    tail: Floats


@register("codec")
@dataclass(frozen=True)
class PowerSGD(Codec):
    """A rank-r approximation by one step of power iteration, with error feedback and a warm start.

    After PowerSGD (Vogels, Karimireddy and Jaggi 2019), **per bucket and per worker**: the flat bucket is reshaped to
    a near-square matrix M, whatever layers it holds, and every worker sends its own factors, which the receiver
    multiplies and adds. In the paper each weight matrix has factors of its own and workers agree on P by all-reduce,
    which makes the sum of all workers rank r; here it may have rank r times the number of workers.

    With Q orthonormal from the round before: P = orthonormalised M Q, Q = M^T P, sent is P Q^T. Layout: float32 P
    and Q, column after column, then the last elements that do not fill a row. A bucket that this would not make smaller
    travels as it is.

    Attributes:
        rank: columns of P and Q.
    """

    rank: int = 2

    name: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        check_number(self.name, "rank", self.rank, 1, 1024, int)

    def encoded_nbytes(self, numel: int) -> int:
        """Return four bytes per element of P, Q and the rest."""
        return self._shape(numel).nbytes

    def _shape(self, numel: int) -> _Shape:
        cols = math.isqrt(numel)
        rows = numel // cols if cols else 0
        shape = _Shape(rows, cols, min(self.rank, cols), numel - rows * cols)
        return shape if shape.nbytes < 4 * numel else _Shape(0, 0, 0, numel)

    def new_state(self, numel: int) -> CodecState:
        """Return a residual of 0 and the first Q: random, the same on every worker."""
        shape = self._shape(numel)
        residual = torch.zeros(numel, dtype=torch.float32, device="cpu")
        return CodecState(numel, residual, q=_random(shape.rank, shape.cols, seed=numel))

    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        start_of_round = self._start(state)
        dropped, residual = state.accumulate(grad), state.residual_array()
        factors = self._factors(payload, len(residual))
        if factors.p.size:
            self._factorise(residual, start_of_round, factors, round)
        tail = residual[len(residual) - len(factors.tail) :]
        factors.tail[:] = tail
        tail[:] = 0
        return dropped

    def _start(self, state: CodecState) -> torch.Tensor:
        shape, q = self._shape(state.numel), state.extra.get("q")
        if q is None or q.shape != (shape.rank, shape.cols):
            raise ValueError(f"the state is not from this codec's new_state: {self.params()} needs a q of other shape")
        return q

    def _factorise(self, residual: Floats, start: torch.Tensor, factors: _Factors, round: int) -> None:
        """Fill P and Q, take their product out of ``residual`` and leave the start of the next round."""
        from paceline.compression.kernels import lowrank

        p, q = torch.from_numpy(factors.p), torch.from_numpy(factors.q)
        matrix = torch.from_numpy(_matrix(residual, factors))
        lowrank.orthonormalise(start.numpy())
        torch.mm(start, matrix.T, out=p)
        lowrank.orthonormalise(factors.p)
        torch.mm(p, matrix, out=q)
        if not bool(p.isfinite().all() and q.isfinite().all()):
            p.zero_()  # the sums overflowed: everything waits in the residual
            q.zero_()
        _add_product(factors, -1.0, residual)
        start.copy_(_without_zero_rows(q, round))

    def _factors(self, payload: Bytes, numel: int) -> _Factors:
        rows, cols, rank, tail = self._shape(numel)
        p, q, rest = np.split(floats(payload), [rank * rows, rank * (rows + cols)])
        assert len(rest) == tail
        return _Factors(p.reshape(rank, rows), q.reshape(rank, cols), rest)

    def _check_content(self, payload: Bytes, numel: int) -> None:
        if not np.isfinite(floats(payload)).all():
            raise self._refuse("a factor is not finite", numel)

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        factors, target = self._factors(payload, out.numel()), out.numpy()
        _add_product(factors, 1.0, target, overwrite=True)
        target[factors.p.shape[1] * factors.q.shape[1] :] = factors.tail

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        factors, target = self._factors(payload, out.numel()), out.numpy()
        _add_product(factors, alpha, target)
        target[factors.p.shape[1] * factors.q.shape[1] :] += np.float32(alpha) * factors.tail


def _matrix(flat: Floats, factors: _Factors) -> Floats:
    rows, cols = factors.p.shape[1], factors.q.shape[1]
    return flat[: rows * cols].reshape(rows, cols)


def _add_product(factors: _Factors, alpha: float, flat: Floats, *, overwrite: bool = False) -> None:
    from paceline.compression.kernels import lowrank

    lowrank.add_product(factors.p, factors.q, np.float32(alpha), overwrite, _matrix(flat, factors))


def _random(rank: int, cols: int, seed: int) -> torch.Tensor:
    return torch.randn(rank, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


def _without_zero_rows(q: torch.Tensor, round: int) -> torch.Tensor:
    """Replace rows of zeros, from which power iteration would never find another direction."""
    zero = (q == 0).all(dim=1, keepdim=True)
    return torch.where(zero, _random(len(q), q.shape[1], seed=round), q)
