"""The product of thin factors, one row at a time: the row stays in the L1 cache while all ranks are added to it."""

from __future__ import annotations

from typing import Any

from numba import types

from paceline.compression.kernels.accumulate import ZERO
from paceline.compression.kernels.jit import MATRIX, MATRIX_IN, kernel


@kernel(types.void(MATRIX_IN, MATRIX_IN, types.float32, types.boolean, MATRIX))
def add_product(p: Any, q: Any, alpha: Any, overwrite: Any, matrix: Any) -> None:
    """``matrix += alpha * p.T @ q``, or ``=`` to overwrite, for p of shape (rank, rows) and q of (rank, cols)."""
    for i in range(matrix.shape[0]):
        row = matrix[i]
        if overwrite:
            row[:] = ZERO
        for k in range(p.shape[0]):
            factor = alpha * p[k, i]
            other = q[k]
            for j in range(len(row)):
                row[j] += factor * other[j]
