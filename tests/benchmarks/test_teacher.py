"""The learning problem of simulated regimes."""

from __future__ import annotations

import numpy as np

from benchmarks.teacher import Teacher


def test_teacher_can_be_learned_from() -> None:
    problem = Teacher(length=3000, inputs=8, hidden=16)
    weights, rng = problem.initial(), np.random.default_rng(0)
    before = problem.accuracy(weights)
    for _ in range(600):
        weights = weights - 0.5 * problem.gradient(weights, rng.integers(0, 3000, 32))
    assert before < 0.35
    assert problem.accuracy(weights) > 0.6
