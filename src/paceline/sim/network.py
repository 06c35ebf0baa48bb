"""A network with one hidden layer, in numpy: its weights are one flat vector."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Indices = NDArray[np.int64]
Samples = NDArray[Any]


class SmallNetwork:
    """One hidden layer of rectified units, and a softmax over classes.

    Args:
        inputs: numbers per sample.
        hidden: units of the hidden layer.
        classes: number of classes of samples.
    """

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        self._shapes = ((inputs, hidden), (hidden,), (hidden, classes), (classes,))
        self._ends = np.cumsum([int(np.prod(shape)) for shape in self._shapes])[:-1].tolist()

    def initial(self, rng: np.random.Generator) -> Vector:
        """Return random weights of the size that keeps the activations' variance (He et al. 2015)."""
        parts = [
            rng.normal(0, (2 / shape[0]) ** 0.5, shape) if len(shape) == 2 else np.zeros(shape)
            for shape in self._shapes
        ]
        return np.concatenate([part.ravel() for part in parts])

    def gradient(self, weights: Vector, x: Samples, labels: Indices) -> Vector:
        """Return the gradient of the mean cross entropy over samples, one per row."""
        w1, b1, w2, b2 = self.parts(weights)
        hidden = np.maximum(x @ w1 + b1, 0)
        scores = hidden @ w2 + b2
        error = np.exp(scores - scores.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        below = (error @ w2.T) * (hidden > 0)
        return np.concatenate([(x.T @ below).ravel(), below.sum(0), (hidden.T @ error).ravel(), error.sum(0)])

    def classes(self, weights: Vector, x: Samples) -> Indices:
        """Return the class of each sample, int64."""
        w1, b1, w2, b2 = self.parts(weights)
        found: Indices = (np.maximum(x @ w1 + b1, 0) @ w2 + b2).argmax(1)
        return found

    def accuracy(self, weights: Vector, x: Samples, labels: Indices) -> float:
        """Return the part of the samples that is classified correctly."""
        return float((self.classes(weights, x) == labels).mean())

    def parts(self, weights: Vector) -> list[Vector]:
        """Return weights as those of both layers: [inputs, hidden], [hidden], [hidden, classes], [classes]."""
        first, second, third = self._ends
        inputs, hidden, classes = self._shapes[0][0], self._shapes[0][1], self._shapes[2][1]
        return [
            weights[:first].reshape(inputs, hidden),
            weights[first:second],
            weights[second:third].reshape(hidden, classes),
            weights[third:],
        ]
