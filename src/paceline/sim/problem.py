"""The data of a simulated job and the small network that learns them; or nothing, where only times count."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.hetero import split_evenly

Vector = NDArray[np.float64]
Indices = NDArray[np.int64]
Samples = NDArray[Any]


#: Units of the hidden layer, unless a problem says another number.
_HIDDEN = 32


class Problem:
    """Data, a model as one flat vector, and its gradient. By itself it is nothing to learn: only times count."""

    length = 1_000_000
    """Number of training samples."""
    labels: Indices = np.zeros(0, np.int64)
    """Class of each training sample, int64; empty where there are none."""

    def initial(self) -> Vector:
        """Return the first weights."""
        return np.zeros(0)

    def gradient(self, weights: Vector, indices: Indices) -> Vector:
        """Return the gradient of the mean loss over some samples."""
        return weights

    def accuracy(self, weights: Vector) -> float:
        """Return the part of the test samples that is classified correctly."""
        return 0.0


class Classified(Problem):
    """Samples with classes, and the small network that learns them.

    Args:
        images: training samples, a row each, of numbers near 1.
        labels: their classes, int64.
        seed: seed of the first weights.
    """

    def __init__(
        self, images: Samples, labels: Indices, test_images: Samples, test_labels: Indices, hidden: int, seed: int
    ) -> None:
        self.images, self.labels = images, labels
        self.test_images, self.test_labels = test_images, test_labels
        self.length = len(labels)
        self.network, self._seed = SmallNetwork(images.shape[1], hidden), seed

    def initial(self) -> Vector:
        """Return random weights."""
        return self.network.initial(np.random.default_rng(self._seed + 1))

    def gradient(self, weights: Vector, indices: Indices) -> Vector:
        """Return the gradient of the mean cross entropy over some samples."""
        return self.network.gradient(weights, self.images[indices], self.labels[indices])

    def accuracy(self, weights: Vector) -> float:
        """Return the part of the test samples that is classified correctly."""
        return float((self.network.classes(weights, self.test_images) == self.test_labels).mean())


class Digits(Classified):
    """1,797 handwritten digits of 8 x 8 pixels and a network with one hidden layer."""

    def __init__(self, seed: int = 0) -> None:
        from paceline.data.digits import read_digits  # imports torch, which other problems do without

        pixels, classes = read_digits()
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(classes))
        images, labels = pixels.reshape(-1, 64)[order] / 16.0, classes[order].astype(np.int64)
        super().__init__(images[360:], labels[360:], images[:360], labels[:360], _HIDDEN, seed)


class SmallNetwork:
    """One hidden layer of rectified units, and a softmax over ten classes."""

    def __init__(self, inputs: int, hidden: int) -> None:
        self._shapes = ((inputs, hidden), (hidden,), (hidden, 10), (10,))
        ends = [0, *np.cumsum([int(np.prod(shape)) for shape in self._shapes]).tolist()]
        self._places = [slice(*both) for both in itertools.pairwise(ends)]

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

    def parts(self, weights: Vector) -> list[Vector]:
        """Return weights as both layers': [inputs, hidden], [hidden], [hidden, 10], [10]."""
        return [weights[place].reshape(shape) for place, shape in zip(self._places, self._shapes, strict=True)]


class OwnData:
    """Every worker goes through a part of its own, shuffled anew each time.

    Args:
        weights: size of the parts, per worker.
        labels: class of each sample; with these, parts have different classes.
        skew: part of the samples that is divided in order of their classes, instead of at random.
    """

    def __init__(
        self, length: int, weights: Sequence[float], seed: int, labels: Indices | None = None, skew: float = 0.0
    ) -> None:
        self._rng = np.random.default_rng([seed, 1])
        order = self._rng.permutation(length)
        sorted_ones = order[: int(skew * length)]
        if labels is not None and len(sorted_ones):
            sorted_ones = sorted_ones[np.argsort(labels[sorted_ones], kind="stable")]
        self._parts = [
            np.concatenate(both)
            for both in zip(_cut(sorted_ones, weights), _cut(order[len(sorted_ones) :], weights), strict=True)
        ]
        self._left: list[Indices] = [np.zeros(0, np.int64) for _ in weights]

    def next(self, worker: int, count: int) -> Indices:
        """Return a worker's next samples, int64."""
        while len(self._left[worker]) < count:
            self._left[worker] = np.concatenate([self._left[worker], self._rng.permutation(self._parts[worker])])
        taken, self._left[worker] = self._left[worker][:count], self._left[worker][count:]
        return taken


def _cut(order: Indices, weights: Sequence[float]) -> list[Indices]:
    return np.split(order, np.cumsum(split_evenly(len(order), weights))[:-1])
