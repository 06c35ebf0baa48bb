"""Thin factors: making them orthonormal and multiplying them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paceline.compression.kernels.accumulate import ZERO
from paceline.compression.kernels.jit import F32_IN, MATRIX, MATRIX_IN, kernel

#: The rest of a row, relative to itself, when it depends on the rows before it.
_DEPENDENT = 1e-5


@kernel(types.float64(F32_IN, F32_IN), fastmath={"reassoc"})
def dot(a: Any, b: Any) -> Any:
    """The inner product in double precision, in any order."""
    total = 0.0
    for i in range(len(a)):
        total += np.float64(a[i]) * np.float64(b[i])
    return total


@kernel(types.void(MATRIX))
def orthonormalise(rows: Any) -> None:
    """Make the rows orthonormal by modified Gram-Schmidt, twice; a row that depends on those before it becomes 0.

    LAPACK's QR would fill such rows at random, and starts its threads for these small matrices, too.
    """
    for k in range(rows.shape[0]):
        row = rows[k]
        before = np.sqrt(dot(row, row))
        for _ in range(2):
            for j in range(k):
                factor = np.float32(dot(rows[j], row))
                for i in range(len(row)):
                    row[i] -= factor * rows[j, i]
        after = np.sqrt(dot(row, row))
        inverse = 1 / after if after > _DEPENDENT * before else 0.0
        for i in range(len(row)):
            row[i] = np.float32(row[i] * inverse)


@kernel(types.void(MATRIX_IN, MATRIX_IN, types.float32, types.boolean, MATRIX))
def add_product(p: Any, q: Any, alpha: Any, overwrite: Any, matrix: Any) -> None:
    """``matrix += alpha * p.T @ q``, or ``=`` to overwrite, for p of shape (rank, rows) and q of (rank, cols).

    A row of the matrix stays in the L1 cache while all ranks are added to it, so that memory is passed over once.
    """
    for i in range(matrix.shape[0]):
        row = matrix[i]
        if overwrite:
            row[:] = ZERO
        for k in range(p.shape[0]):
            factor = alpha * p[k, i]
            other = q[k]
            for j in range(len(row)):
                row[j] += factor * other[j]
