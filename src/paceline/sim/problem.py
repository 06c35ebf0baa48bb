"""What a simulated job learns: handwritten digits with a small network, or nothing (only times count)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Indices = NDArray[np.int64]


class Problem(Protocol):
    """Data, a model as one flat vector, and its gradient."""

    length: int
    """Number of training samples."""

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
    """1,797 handwritten digits of 8 x 8 pixels (scikit-learn) and a network with one hidden layer.

    Args:
        hidden: units of the hidden layer.
        seed: of the first weights and of the choice of the test samples.

    Attributes:
        images: of the training samples, [1437, 64] float64 in 0 to 1.
        labels: of the training samples, [1437] int64.
        test_images: [360, 64] float64.
        test_labels: [360] int64.

    Raises:
        ImportError: scikit-learn is not installed.
    """

    def __init__(self, hidden: int = 32, seed: int = 0) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError("the digits come with scikit-learn: pip install 'paceline[sim]'") from error
        images, labels = load_digits(return_X_y=True)
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(labels))
        images, labels = images[order] / 16.0, labels[order]
        self.test_images, self.test_labels = images[:360], labels[:360]
        self.images, self.labels = images[360:], labels[360:]
        self.length = len(self.labels)
        self._shapes = ((64, hidden), (hidden,), (hidden, 10), (10,))
        self._seed = seed

    def initial(self) -> Vector:
        """Return random weights of the size that keeps the activations' variance (He et al. 2015)."""
        rng = np.random.default_rng(self._seed + 1)
        parts = [
            rng.normal(0, (2 / shape[0]) ** 0.5, shape) if len(shape) == 2 else np.zeros(shape)
            for shape in self._shapes
        ]
        return np.concatenate([part.ravel() for part in parts])

    def gradient(self, weights: Vector, indices: Indices) -> Vector:
        """Return the gradient of the mean cross entropy over some samples."""
        w1, b1, w2, b2 = self.parts(weights)
        x, labels = self.images[indices], self.labels[indices]
        hidden = np.maximum(x @ w1 + b1, 0)
        scores = hidden @ w2 + b2
        error = np.exp(scores - scores.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        below = (error @ w2.T) * (hidden > 0)
        return np.concatenate([(x.T @ below).ravel(), below.sum(0), (hidden.T @ error).ravel(), error.sum(0)])

    def accuracy(self, weights: Vector) -> float:
        """Return the part of the 360 test samples that is classified correctly."""
        w1, b1, w2, b2 = self.parts(weights)
        scores = np.maximum(self.test_images @ w1 + b1, 0) @ w2 + b2
        return float((scores.argmax(1) == self.test_labels).mean())

    def parts(self, weights: Vector) -> list[Vector]:
        """Return weights as those of both layers: w1 [64, hidden], b1 [hidden], w2 [hidden, 10], b2 [10]."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self._shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(weights, ends), self._shapes, strict=True)]


class Nothing:
    """A problem without data: only times count."""

    length = 1_000_000

    def initial(self) -> Vector:
        """Return no weights."""
        return np.zeros(0)

    def gradient(self, weights: Vector, indices: Indices) -> Vector:
        """Return no gradient."""
        return weights

    def accuracy(self, weights: Vector) -> float:
        """Return 0: nothing is learned."""
        return 0.0
