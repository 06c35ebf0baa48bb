"""A learning problem of any size for simulated jobs."""

from __future__ import annotations

import numpy as np

from paceline.sim.problem import Classified, SmallNetwork


class Teacher(Classified):
    """Samples that a random network classifies, some of them wrongly: as many as one wants.

    No sample is seen often, so the number of samples counts that a job trains on, and how well it uses them.

    Args:
        length: training samples.
        inputs: numbers per sample, normally distributed.
        hidden: units of the hidden layer that learns; the teacher has twice as many.
        noise: part of the training labels that is random.
        seed: seed of the samples, the teacher and the first weights.
    """

    def __init__(
        self, length: int = 100_000, inputs: int = 16, hidden: int = 32, noise: float = 0.05, seed: int = 0
    ) -> None:
        rng = np.random.default_rng([seed, 7])
        teacher = SmallNetwork(inputs, 2 * hidden)
        weights = teacher.initial(rng)
        train = rng.normal(size=(length, inputs)).astype(np.float32)
        test = rng.normal(size=(1000, inputs))
        labels = teacher.classes(weights, train)
        wrong = rng.random(length) < noise
        labels[wrong] = rng.integers(0, 10, int(wrong.sum()))
        super().__init__(train, labels, test, teacher.classes(weights, test), hidden, seed)
