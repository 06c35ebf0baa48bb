"""Learning problems of simulated jobs, for a small network: digits, a teacher's classes, or none: only times count."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from paceline.sim.network import Indices, SmallNetwork, Vector


class Problem(Protocol):
    """Data, a model as one flat vector, and its gradient."""

    length: int
    """Number of training samples."""
    labels: Indices
    """Class of each training sample, int64; empty where there are none."""

    def initial(self) -> Vector:
        """Return the first weights."""
        ...

    def gradient(self, weights: Vector, indices: Indices) -> Vector:
        """Return the gradient of the mean loss over some samples."""
        ...

    def accuracy(self, weights: Vector) -> float:
        """Return the part of the test samples that is classified correctly."""
        ...


class Digits:
    """1,797 handwritten digits of 8 x 8 pixels and a network with one hidden layer.

    Args:
        hidden: units of the hidden layer.
        seed: seed of the first weights and of the choice of the test samples.

    Attributes:
        images: images of the training samples, [1437, 64] float64 in 0 to 1.
        labels: labels of the training samples, [1437] int64.
        test_images: [360, 64] float64.
        test_labels: [360] int64.
    """

    def __init__(self, hidden: int = 32, seed: int = 0) -> None:
        from paceline.data.digits import read_digits  # imports torch, which other problems do without

        pixels, classes = read_digits()
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(classes))
        images, labels = pixels.reshape(-1, 64)[order] / 16.0, classes[order].astype(np.int64)
        self.test_images, self.test_labels = images[:360], labels[:360]
        self.images, self.labels = images[360:], labels[360:]
        self.length = len(self.labels)
        self._network, self._seed = SmallNetwork(64, hidden, 10), seed

    def initial(self) -> Vector:
        """Return random weights."""
        return self._network.initial(np.random.default_rng(self._seed + 1))

    def gradient(self, weights: Vector, indices: Indices) -> Vector:
        """Return the gradient of the mean cross entropy over some samples."""
        return self._network.gradient(weights, self.images[indices], self.labels[indices])

    def accuracy(self, weights: Vector) -> float:
        """Return the part of the 360 test samples that is classified correctly."""
        return self._network.accuracy(weights, self.test_images, self.test_labels)

    def parts(self, weights: Vector) -> list[Vector]:
        """Return weights as those of both layers: w1 [64, hidden], b1 [hidden], w2 [hidden, 10], b2 [10]."""
        return self._network.parts(weights)


class Teacher:
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
        teacher = SmallNetwork(inputs, 2 * hidden, 10)
        weights = teacher.initial(rng)
        self._train = rng.normal(size=(length, inputs)).astype(np.float32)
        self._test = rng.normal(size=(1000, inputs))
        self.labels = teacher.classes(weights, self._train)
        wrong = rng.random(length) < noise
        self.labels[wrong] = rng.integers(0, 10, int(wrong.sum()))
        self._test_labels = teacher.classes(weights, self._test)
        self.length = length
        self._network, self._seed = SmallNetwork(inputs, hidden, 10), seed

    def initial(self) -> Vector:
        """Return random weights."""
        return self._network.initial(np.random.default_rng(self._seed + 1))

    def gradient(self, weights: Vector, indices: Indices) -> Vector:
        """Return the gradient of the mean cross entropy over some samples."""
        return self._network.gradient(weights, self._train[indices], self.labels[indices])

    def accuracy(self, weights: Vector) -> float:
        """Return the part of 1,000 test samples that is classified as the teacher does."""
        return self._network.accuracy(weights, self._test, self._test_labels)


class Nothing:
    """A problem without data: only times count."""

    length = 1_000_000
    labels = np.zeros(0, np.int64)

    def initial(self) -> Vector:
        """Return no weights."""
        return np.zeros(0)

    def gradient(self, weights: Vector, indices: Indices) -> Vector:
        """Return no gradient."""
        return weights

    def accuracy(self, weights: Vector) -> float:
        """Return 0: there is no problem to learn."""
        return 0.0
