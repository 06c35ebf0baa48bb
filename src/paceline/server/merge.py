"""Sums the pushes of a cohort's workers, and compares the optimizer options that come with them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from paceline.compression import Codec
from paceline.layout.ranges import Ranges, common, within
from paceline.updaters import StepOptions, options_apart
from paceline.updaters.rows import add_rows

#: (worker, note) of pushes.
Notes: TypeAlias = Sequence[tuple[int, bytes]]


class Scratch:
    """Flat tensors that are lent and given back. The last one given back is lent first: it is still in the cache.

    A server has many buckets, and most of the time sums but one of them: a buffer for each would be as large as the
    model, and cold at every use.
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of any content, of at least ``numel`` elements; the borrower uses a part of it."""
        free = self._free.setdefault(dtype, [])
        for index in range(len(free) - 1, -1, -1):
            if free[index].numel() >= numel:
                return free.pop(index)
        if free:
            free.pop()  # a larger one takes its place
        return torch.empty(numel, dtype=dtype, device="cpu")

    def give_back(self, lent: torch.Tensor) -> None:
        """Take back a lent tensor, which is not in use any more."""
        self._free[lent.dtype].append(lent)


@dataclass(frozen=True)
class Encoded:
    """Values as a codec made them. They are decoded into the sum, without memory and a pass of their own."""

    codec: Codec
    payload: Any
    """Checked."""
    numel: int

    def decoded(self) -> torch.Tensor:
        """Return the values, flat, float32."""
        values = torch.empty(self.numel, dtype=torch.float32, device="cpu")
        self.codec.decode(self.payload, values)
        return values


@dataclass(slots=True)
class Contribution:
    """One worker's push of one slot, or the sum of those of several workers on one host."""

    values: torch.Tensor | Encoded | None
    """Flat, or some rows of a key (sparse), or encoded. Sums are made in this memory unless it is ``borrowed``. None:
    there is no gradient at all."""
    samples: float
    options: StepOptions | None
    borrowed: bool
    """The values lie in the worker's own memory."""
    unit: float | None = None
    """For a sum: values times this are the sum of gradients times their samples. None: ``samples``."""
    others: tuple[int, ...] = ()
    """Workers behind a sum, except the one in whose name it is added."""
    absent: Ranges = ()
    """Where there is no gradient; the values are zeros there."""
    skip: bool = False
    """The update must not be made; there are no values."""
    problem: str = ""
    """Why the pushes behind a sum cannot make one update."""
    notes: Notes = ()
    """Notes that the workers behind it send each other."""


class _Sum:
    """A sum in progress: nothing, the values of one contribution, or values in memory of the server."""

    def __init__(self, dtype: torch.dtype, scratch: Scratch) -> None:
        self._dtype, self._scratch = dtype, scratch
        self._lent: torch.Tensor | None = None
        self.values: torch.Tensor | Encoded | None = None
        self.unit = 1.0
        self.borrowed = False

    def add(self, values: torch.Tensor | Encoded, unit: float, borrowed: bool) -> None:
        """Add values that weigh ``unit``."""
        if isinstance(values, torch.Tensor) and values.dtype != self._dtype:
            values, borrowed = values.to(self._dtype), False
        if self.values is None:
            self.values, self.unit, self.borrowed = values, unit, borrowed
            return
        so_far, factor = self.tensor(), unit / self.unit
        is_ours = not (so_far.is_sparse or self.borrowed)
        if isinstance(values, Encoded) and self._dtype == torch.float32 and is_ours:
            values.codec.decode_add(values.payload, so_far, factor)
            return
        one = values.decoded().to(self._dtype) if isinstance(values, Encoded) else values
        if so_far.is_sparse and one.is_sparse:
            self.values = add_rows(so_far, one if factor == 1.0 else one * factor)
        else:
            so_far, one = _dense(so_far), _dense(one)
            out = so_far if is_ours else self._lend(so_far.numel())
            self.values = torch.add(so_far, one, alpha=factor, out=out)
        self.borrowed = False

    def tensor(self) -> torch.Tensor:
        """Return the values as a tensor; encoded ones are decoded into memory of the server."""
        assert self.values is not None
        if isinstance(self.values, Encoded):
            if self._dtype == torch.float32:
                decoded = self._lend(self.values.numel)
                self.values.codec.decode(self.values.payload, decoded)
            else:
                decoded = self.values.decoded().to(self._dtype)
            self.values, self.borrowed = decoded, False
        return self.values

    def own(self) -> torch.Tensor:
        """Return the values where they may be changed."""
        values = self.tensor()
        if self.borrowed and not values.is_sparse:
            values = self._lend(values.numel()).copy_(values)
            self.values, self.borrowed = values, False
        return values

    def _lend(self, numel: int) -> torch.Tensor:
        if self._lent is None:
            self._lent = self._scratch.lend(numel, self._dtype)
        return self._lent[:numel]

    def close(self) -> None:
        """Give scratch memory back; the values are gone."""
        if self._lent is not None:
            self._scratch.give_back(self._lent)
        self._lent = self.values = None

    def part(self, part: slice) -> _Sum:
        """Return the sum over a range. It uses the same memory, which is not given back."""
        other = _Sum(self._dtype, self._scratch)
        other.values = None if self.values is None else _flat(self.values)[part]
        other.unit, other.borrowed = self.unit, self.borrowed and isinstance(self.values, torch.Tensor)
        return other


class Accumulator:
    """Sums the contributions of one cohort, host by host, and on each host in the order of ranks.

    The fixed order makes the sum the same bit for bit, in any order of arrival, and wherever the sum over one
    host is made. Contributions are merged as early as the order allows, so that they need not be kept.

    Args:
        expected: the workers that will contribute, in order, host by host; empty: take them as they come.
        mean: weigh by samples.
        dtype: element type of the sum.
        scratch: memory for a sum where no contribution can be summed into.
    """

    def __init__(self, expected: Sequence[Sequence[int]], mean: bool, dtype: torch.dtype, scratch: Scratch) -> None:
        self._expected = list(map(list, expected))
        self._mean, self._dtype, self._scratch = mean, dtype, scratch
        self._held: dict[int, Contribution] = {}
        self._host, self._whole = _Sum(dtype, scratch), _Sum(dtype, scratch)
        self._samples = 0.0
        self.absent: Ranges | None = None
        """Where no worker with samples had a gradient, known when all are merged; None: no worker had samples."""
        self.shares: dict[int, float] = {}
        """Samples per worker that has pushed by itself."""
        self.options: StepOptions | None = None
        self._options_of = 0
        self.skip = False
        """A worker has said that the update must not be made."""
        self.problem = ""
        """Why the contributions cannot make one update; known when all are merged."""
        self.notes: list[tuple[int, bytes]] = []

    def add(self, worker: int, contribution: Contribution) -> None:
        """Take the contribution of one worker, or of several workers in the name of the first."""
        self._held[worker] = contribution
        self.shares[worker] = self.shares.get(worker, 0.0) + contribution.samples
        self.notes += contribution.notes
        for host in self._expected if contribution.others else ():
            host[:] = [one for one in host if one not in contribution.others]
        while self._expected:
            host = self._expected[0]
            while host and host[0] in self._held:
                self._merge(host[0], self._held.pop(host.pop(0)))
            if host:
                return
            self._end_host()
            self._expected.pop(0)
        if self._held:
            self._merge_rest()

    def _merge(self, worker: int, one: Contribution) -> None:
        """Add to the sum of the current host."""
        if self.options is None:
            self.options, self._options_of = one.options, worker
        elif one.options not in (None, self.options):
            self.problem = self.problem or options_apart(self.options, one.options, self._options_of, worker)
        self.problem = self.problem or one.problem
        self.skip = self.skip or one.skip
        if one.samples == 0:
            return
        self._samples += one.samples
        self.absent = one.absent if self.absent is None else common(self.absent, one.absent)
        if one.values is None:
            return
        unit = (one.samples if one.unit is None else one.unit) if self._mean else 1.0
        self._host.add(one.values, unit, one.borrowed)

    def _end_host(self) -> None:
        """Add the sum of the current host to the whole."""
        if self._whole.values is None:
            self._whole, self._host = self._host, self._whole
        elif self._host.values is not None:
            self._whole.add(self._host.values, self._host.unit, self._host.borrowed)
            self._host.close()

    def _merge_rest(self) -> None:
        """Merge the contributions held back, without the workers that they waited for."""
        for host in [*self._expected, *([worker] for worker in sorted(self._held))]:
            for worker in host:
                if worker in self._held:
                    self._merge(worker, self._held.pop(worker))
            self._end_host()
        self._expected = []

    def sum(self) -> tuple[torch.Tensor, float] | None:
        """Return the sum and its unit, or None when no worker had a gradient; it may be used until :meth:`close`.

        With a mean, sum times unit is the sum of gradients times their samples. It may be in a worker's memory.
        """
        if self._held or self._expected:
            self._merge_rest()
        if self._whole.values is None:
            return None
        values = self._whole.values
        if isinstance(values, Encoded):
            values = self._whole.tensor()
        return values.coalesce() if values.is_sparse else values, self._whole.unit

    def result(self, weight: float = 1.0, to_read: bool = False) -> tuple[torch.Tensor, float] | None:
        """Return the sum and the factor that makes it the gradient times a weight, or None, as :meth:`sum` does.

        Args:
            weight: weight of the update.
            to_read: the values are only read; else they may be changed until :meth:`close`, unless the factor is 1.
        """
        found = self.sum()
        if found is None:
            return None
        values, scale = found[0], weight * (found[1] / self._samples if self._mean else 1.0)
        return values if to_read or scale == 1.0 or values.is_sparse else self._whole.own(), scale

    def close(self) -> None:
        """Give scratch memory back; the result is gone."""
        self._host.close()
        self._whole.close()

    def split(self, at: int) -> tuple[Accumulator, Accumulator]:
        """Return accumulators of both halves, which share this one's scratch memory for good."""
        return self._part(slice(0, at)), self._part(slice(at, sys.maxsize))

    def _part(self, part: slice) -> Accumulator:
        other = copy.copy(self)
        other._expected = [list(host) for host in self._expected]
        other._held = {worker: _cut(one, part) for worker, one in self._held.items()}
        other._host, other._whole = self._host.part(part), self._whole.part(part)
        other.shares, other.notes = dict(self.shares), list(self.notes)
        other.absent = None if self.absent is None else within(self.absent, part.start, part.stop)
        return other


def _flat(values: torch.Tensor | Encoded) -> torch.Tensor:
    return _dense(values.decoded() if isinstance(values, Encoded) else values)


def _dense(values: torch.Tensor) -> torch.Tensor:
    return values.to_dense().view(-1) if values.is_sparse else values


def _cut(one: Contribution, part: slice) -> Contribution:
    values = None if one.values is None else _flat(one.values)[part]
    return replace(one, values=values, absent=within(one.absent, part.start, part.stop))
