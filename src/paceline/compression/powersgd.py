"""Low-rank gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from paceline.compression.base import (
    Bytes,
    Codec,
    State,
    check_integer,
    float32_parts,
    floats,
    residual_of,
)
from paceline.compression.registry import register


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
    """The parts of a payload: P of shape (rows, rank), Q of shape (cols, rank), and the tail."""

    p: torch.Tensor
    q: torch.Tensor
    tail: torch.Tensor


@register
@dataclass(frozen=True)
class PowerSGD(Codec):
    """A rank-r approximation by one step of power iteration, with error feedback and a warm start.

    After PowerSGD (Vogels, Karimireddy and Jaggi 2019), **per bucket and per worker**: the flat bucket is reshaped to
    a near-square matrix M, whatever layers it holds, and every worker sends its own factors, which the receiver
    multiplies and adds. In the paper each weight matrix has factors of its own and workers agree on P by all-reduce,
    which makes the sum of all workers rank r; here it may have rank r times the number of workers.

    With Q orthonormal from the round before: P = orthonormalised M Q, Q = M^T P, sent is P Q^T. Layout: float32 P
    (rows x rank), Q (cols x rank), then the last elements that do not fill a row. A bucket that this would not make
    smaller travels as it is.

    Attributes:
        rank: columns of P and Q.
    """

    rank: int = 2

    name: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        check_integer(self.name, "rank", self.rank, 1, 1024)

    def encoded_nbytes(self, numel: int) -> int:
        """Return four bytes per element of P, Q and the rest."""
        return self._shape(numel).nbytes

    def _shape(self, numel: int) -> _Shape:
        cols = math.isqrt(numel)
        rows = numel // cols if cols else 0
        shape = _Shape(rows, cols, min(self.rank, cols), numel - rows * cols)
        return shape if shape.nbytes < 4 * numel else _Shape(0, 0, 0, numel)

    def new_state(self, numel: int) -> State:
        """Return a residual of 0 and the first Q: random, the same on every worker."""
        shape = self._shape(numel)
        return State(numel, torch.zeros(numel), q=_random(shape.cols, shape.rank, seed=numel))

    def _encode(self, grad: torch.Tensor, state: State, payload: Bytes, round: int, seed: int) -> int:
        from paceline.compression.kernels import accumulate

        residual = residual_of(state)
        dropped: int = sum(
            accumulate.accumulate(part, residual[start : start + len(part)]) for start, part in float32_parts(grad)
        )
        self._factorise(torch.from_numpy(residual), state.extra["q"], self._factors(payload, grad.numel()), round)
        return dropped

    def _factorise(self, residual: torch.Tensor, start: torch.Tensor, factors: _Factors, round: int) -> None:
        """Fill ``factors``, take their product out of ``residual`` and leave the start of the next round."""
        rows, cols = len(factors.p), len(factors.q)
        tail = residual[rows * cols :]
        factors.tail.copy_(tail)
        tail.zero_()
        if rows:
            matrix = residual[: rows * cols].view(rows, cols)
            factors.p.copy_(torch.linalg.qr(matrix @ torch.linalg.qr(start).Q).Q)
            torch.mm(matrix.T, factors.p, out=factors.q)
            matrix.addmm_(factors.p, factors.q.T, alpha=-1)
            start.copy_(_without_zero_columns(factors.q, round))

    def _factors(self, payload: Bytes, numel: int) -> _Factors:
        rows, cols, rank, tail = self._shape(numel)
        whole = torch.from_numpy(floats(payload))
        p, q, rest = torch.split(whole, [rows * rank, cols * rank, tail])
        return _Factors(p.view(rows, rank), q.view(cols, rank), rest)

    def _check_content(self, payload: Bytes, numel: int) -> None:
        if not np.isfinite(floats(payload)).all():
            raise self._refuse("a factor is not finite", numel)

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        p, q, tail = self._factors(payload.copy(), out.numel())
        matrix, rest = _matrix_and_rest(out, p, q)
        torch.mm(p, q.T, out=matrix)
        rest.copy_(tail)

    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        p, q, tail = self._factors(payload.copy(), out.numel())
        matrix, rest = _matrix_and_rest(out, p, q)
        matrix.addmm_(p, q.T, alpha=alpha)
        rest.add_(tail, alpha=alpha)


def _matrix_and_rest(flat: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    end = len(p) * len(q)
    return flat[:end].view(len(p), len(q)), flat[end:]


def _random(cols: int, rank: int, seed: int) -> torch.Tensor:
    return torch.randn(cols, rank, generator=torch.Generator().manual_seed(seed))


def _without_zero_columns(q: torch.Tensor, round: int) -> torch.Tensor:
    """Replace columns of zeros, from which power iteration might never find another direction."""
    zero = (q == 0).all(dim=0)
    return torch.where(zero, _random(len(q), len(zero), seed=round), q)
