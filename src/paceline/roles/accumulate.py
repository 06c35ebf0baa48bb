"""Merging what the workers of a cohort pushed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.compression import Codec
from paceline.updaters import StepOptions


@dataclass(frozen=True)
class Encoded:
    """Values as a codec made them, decoded where they are summed: that takes no memory and no pass of its own."""

    codec: Codec
    payload: Any
    """Checked."""
    numel: int

    def decoded(self) -> torch.Tensor:
        """Return the values, flat, float32."""
        values = torch.empty(self.numel)
        self.codec.decode(self.payload, values)
        return values


@dataclass(frozen=True)
class Contribution:
    """One worker's push of one slot."""

    values: torch.Tensor | Encoded
    """Flat, or some rows of a key (sparse), or encoded; not ours to change when ``borrowed``."""
    samples: float
    options: StepOptions | None
    borrowed: bool
    """The values lie in the worker's own memory."""


class Accumulator:
    """Sums the contributions of one cohort, in the order of ranks as far as they have come.

    A fixed order makes the sum the same bit for bit, whatever the order of arrival. Values are merged as early as that
    allows, so that they need not be kept.

    Args:
        expected: the workers that will contribute, in order; empty: take them as they come.
        mean: weigh by samples.
        dtype: element type of the sum.
        buffer: where to sum, provided when it is needed.
    """

    def __init__(self, expected: Sequence[int], mean: bool, dtype: torch.dtype) -> None:
        self._expected = list(expected)
        self._mean = mean
        self.dtype = dtype
        self._held: dict[int, Contribution] = {}
        self._first: Contribution | None = None
        self._sum: torch.Tensor | None = None
        self._samples = 0.0
        self.options: StepOptions | None = None

    def add(self, worker: int, contribution: Contribution, buffer: torch.Tensor) -> None:
        """Take one worker's values; ``buffer`` is where sums go."""
        self._held[worker] = contribution
        while self._expected and self._expected[0] in self._held:
            self._merge(self._held.pop(self._expected.pop(0)), buffer)
        if not self._expected and worker in self._held:
            self._merge(self._held.pop(worker), buffer)

    def _merge(self, one: Contribution, buffer: torch.Tensor) -> None:
        self.options = self.options or one.options
        if one.samples == 0:
            return
        self._samples += one.samples if self._mean else 0.0
        if self._first is None:
            self._first = one
            return
        factor = one.samples / self._first.samples if self._mean else 1.0
        so_far = self._converted(self._first, buffer) if self._sum is None else self._sum
        if isinstance(one.values, Encoded) and self.dtype == torch.float32 and _is(so_far, buffer):
            one.values.codec.decode_add(one.values.payload, buffer, factor)
            self._sum = buffer
        else:
            self._sum = _added(so_far, self._converted(one), factor, buffer)

    def _converted(self, one: Contribution, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Return values as a tensor of the sum's type; encoded ones in the buffer where that is possible."""
        values = one.values
        if isinstance(values, Encoded):
            if buffer is not None and self.dtype == torch.float32:
                values.codec.decode(values.payload, buffer)
                return buffer
            values = values.decoded()
        return values if values.dtype == self.dtype else values.to(self.dtype)

    def result(self, weight: float, buffer: torch.Tensor) -> tuple[torch.Tensor, float] | None:
        """Return the sum and the factor that makes it the gradient, or None when nobody had samples."""
        for worker in sorted(self._held):
            self._merge(self._held[worker], buffer)
        self._held.clear()
        if self._first is None:
            return None
        scale = weight * (self._first.samples / self._samples if self._mean else 1.0)
        if self._sum is not None:
            return self._sum.coalesce() if self._sum.is_sparse else self._sum, scale
        values = self._converted(self._first, buffer)
        if self._first.borrowed and scale != 1.0 and values is self._first.values:
            values = buffer.copy_(values)
        return values, scale

    def split(self, at: int) -> tuple[Accumulator, Accumulator]:
        """Return accumulators of both halves."""
        return self._part(slice(None, at)), self._part(slice(at, None))

    def _part(self, part: slice) -> Accumulator:
        other = Accumulator(self._expected, self._mean, self.dtype)
        other._held = {worker: _cut(one, part) for worker, one in self._held.items()}
        other._first = None if self._first is None else _cut(self._first, part)
        other._sum = None if self._sum is None else _flat(self._sum)[part]
        other._samples, other.options = self._samples, self.options
        return other


def _added(so_far: torch.Tensor, one: torch.Tensor, factor: float, buffer: torch.Tensor) -> torch.Tensor:
    """Return the sum: of rows while all contributions are rows, else flat in the buffer."""
    if so_far.is_sparse and one.is_sparse:
        return so_far + (one if factor == 1.0 else one * factor)
    return torch.add(_flat(so_far), _flat(one), alpha=factor, out=buffer)


def _is(one: torch.Tensor, buffer: torch.Tensor) -> bool:
    return not one.is_sparse and one.data_ptr() == buffer.data_ptr()


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.to_dense().view(-1) if values.is_sparse else values


def _cut(one: Contribution, part: slice) -> Contribution:
    values = one.values.decoded() if isinstance(one.values, Encoded) else _flat(one.values)
    return Contribution(values[part], one.samples, one.options, one.borrowed)
