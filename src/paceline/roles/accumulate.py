"""Merging what the workers of a cohort pushed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.compression import Codec
from paceline.roles.scratch import Scratch
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
    """Flat, or some rows of a key (sparse), or encoded; not ours to change when ``borrowed``, else sums go there."""
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
        scratch: memory for a sum where no contribution can be summed into.
    """

    def __init__(self, expected: Sequence[int], mean: bool, dtype: torch.dtype, scratch: Scratch) -> None:
        self._expected = list(expected)
        self._mean, self._dtype, self._scratch = mean, dtype, scratch
        self._held: dict[int, Contribution] = {}
        self._first: Contribution | None = None
        self._sum: torch.Tensor | None = None
        self._lent: torch.Tensor | None = None
        self._samples = 0.0
        self.options: StepOptions | None = None

    def add(self, worker: int, contribution: Contribution) -> None:
        """Take one worker's values."""
        self._held[worker] = contribution
        while self._expected and self._expected[0] in self._held:
            self._merge(self._held.pop(self._expected.pop(0)))
        if not self._expected and worker in self._held:
            self._merge(self._held.pop(worker))

    def _merge(self, one: Contribution) -> None:
        self.options = self.options or one.options
        if one.samples == 0:
            return
        self._samples += one.samples if self._mean else 0.0
        if self._first is None:
            self._first = one
            return
        factor = one.samples / self._first.samples if self._mean else 1.0
        so_far = self._converted(self._first) if self._sum is None else self._sum
        values = one.values
        if isinstance(values, Encoded) and self._dtype == torch.float32 and self._is_ours(so_far):
            values.codec.decode_add(values.payload, so_far, factor)
            self._sum = so_far
        else:
            self._sum = self._added(so_far, self._as_tensor(values), factor)

    def _added(self, so_far: torch.Tensor, one: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the sum: of rows while all contributions are rows, else flat."""
        if so_far.is_sparse and one.is_sparse:
            return so_far + (one if factor == 1.0 else one * factor)
        out = so_far if self._is_ours(so_far) else self._lend(_flat(so_far).numel())
        return torch.add(_flat(so_far), _flat(one), alpha=factor, out=out)

    def _is_ours(self, values: torch.Tensor) -> bool:
        """Tell whether a sum can go where these values are."""
        assert self._first is not None
        return not values.is_sparse and not (self._first.borrowed and values is self._first.values)

    def _lend(self, numel: int) -> torch.Tensor:
        if self._lent is None:
            self._lent = self._scratch.lend(numel, self._dtype)
        return self._lent[:numel]

    def _converted(self, one: Contribution) -> torch.Tensor:
        """Return values as a tensor of the sum's type; encoded ones in scratch memory where that is possible."""
        if isinstance(one.values, Encoded) and self._dtype == torch.float32:
            decoded = self._lend(one.values.numel)
            one.values.codec.decode(one.values.payload, decoded)
            return decoded
        return self._as_tensor(one.values)

    def _as_tensor(self, values: torch.Tensor | Encoded) -> torch.Tensor:
        values = values.decoded() if isinstance(values, Encoded) else values
        return values if values.dtype == self._dtype else values.to(self._dtype)

    def result(self, weight: float) -> tuple[torch.Tensor, float] | None:
        """Return the sum and the factor that makes it the gradient, or None when nobody had samples.

        It may be used until :meth:`close`.
        """
        for worker in sorted(self._held):
            self._merge(self._held[worker])
        self._held.clear()
        if self._first is None:
            return None
        scale = weight * (self._first.samples / self._samples if self._mean else 1.0)
        if self._sum is not None:
            return self._sum.coalesce() if self._sum.is_sparse else self._sum, scale
        values = self._converted(self._first)
        if scale != 1.0 and not values.is_sparse and not self._is_ours(values):
            values = self._lend(values.numel()).copy_(values)
        return values, scale

    def close(self) -> None:
        """Give scratch memory back; the result is gone."""
        if self._lent is not None:
            self._scratch.give_back(self._lent)
            self._lent = self._sum = None

    def split(self, at: int) -> tuple[Accumulator, Accumulator]:
        """Return accumulators of both halves, which share this one's scratch memory for good."""
        return self._part(slice(None, at)), self._part(slice(at, None))

    def _part(self, part: slice) -> Accumulator:
        other = Accumulator(self._expected, self._mean, self._dtype, self._scratch)
        other._held = {worker: _cut(one, part) for worker, one in self._held.items()}
        other._first = None if self._first is None else _cut(self._first, part)
        other._sum = None if self._sum is None else _flat(self._sum)[part]
        other._samples, other.options = self._samples, self.options
        return other


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.to_dense().view(-1) if values.is_sparse else values


def _cut(one: Contribution, part: slice) -> Contribution:
    values = one.values.decoded() if isinstance(one.values, Encoded) else _flat(one.values)
    return Contribution(values[part], one.samples, one.options, one.borrowed)
