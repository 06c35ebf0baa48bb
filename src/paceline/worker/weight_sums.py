"""Sums of weights, by which workers that step on their own weights are compared: ``membership/same_weights``.

The elements of a parameter are added up with random signs, which are the same on all workers and others after each
step. The sums of weights that differ by a vector ``d`` differ by about its length: it does not matter how the signs of
its elements lie.

Unlike machines round the same update differently. That adds up like a random walk, so the part of a weight that may
differ grows with the root of the steps: :data:`_ROUNDING` of it, up to :data:`_MOST`. Types of 16 bits round by more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from paceline.layout.tensors import floats, real_view

#: Steps between two comparisons, at most. Before that they are powers of 2. One costs less than a tenth of a step.
_INTERVAL = 512

#: Part of a weight that may differ after one step, and after many; and the same in units of the type's rounding.
_ROUNDING, _MOST, _MOST_UNITS = 3e-4, 1e-2, 16

#: Parts of a step's sums. Parameters of models that have more are added up in turns.
_MOST_SUMS = 512

#: Elements of small parameters, relative to those of all parameters, whose rounding is also that of larger values.
_SMALL = 0.1

#: Elements of a row; and rows of a parameter that are added up: of a larger one only some, others in each step.
_ROW, _MOST_ROWS = 4096, 1024


def is_due(step: int) -> bool:
    """Return whether weights are compared after this step, counted from 1."""
    return step & (step - 1) == 0 or step % _INTERVAL == 0


def sums_of(weights: Mapping[str, torch.Tensor], step: int) -> list[tuple[str, float, float]]:
    """Return the name of each parameter, its sum, and by how much that may differ on another machine.

    There is at least one; the step is the same on all workers.
    """
    named = {name: real_view(one).detach() for name, one in weights.items() if one.layout is torch.strided}
    signs = _Signs(step)
    parts = [_part_of(one, signs) for one in named.values()]
    sums, norms = (
        floats([_sum_of(one, signs) for one in parts]),
        floats([torch.linalg.vector_norm(one) for one in parts]),
    )
    finite = [(norm, one.numel()) for norm, one in zip(norms, parts, strict=True) if math.isfinite(norm)]
    usual = math.sqrt(sum(norm * norm for norm, _ in finite) / max(sum(count for _, count in finite), 1))
    found = []
    for (name, one), part, total, norm in zip(named.items(), parts, sums, norms, strict=True):
        size = norm + _SMALL * usual * math.sqrt(part.numel())
        found.append((name, total, _may_differ(one.dtype, step) * size if math.isfinite(norm) else math.inf))
    return found if len(found) <= _MOST_SUMS else list(_joined(found))


def _may_differ(dtype: torch.dtype, step: int) -> float:
    """Return the part of a weight by which machines may differ after so many steps."""
    units = _MOST_UNITS * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return max(min(_MOST, _ROUNDING * math.sqrt(step)), units)


class _Signs:
    """The random signs of one step.

    Attributes:
        elements: those of the elements of a row.
        rows: those of rows.
        first: which of several rows is the first, between 0 and 1.
    """

    def __init__(self, step: int) -> None:
        chance = torch.Generator().manual_seed(step)
        drawn = torch.randint(1 << 16, (_ROW + _MOST_ROWS + 1,), generator=chance, device="cpu")
        signs = drawn % 2 * 2.0 - 1
        self.elements, self.rows = signs[:_ROW], signs[_ROW:-1]
        self.first = drawn[-1].item() / (1 << 16)


def _part_of(one: torch.Tensor, signs: _Signs) -> torch.Tensor:
    """Return the elements that are added up: all, flat; of a large tensor some rows."""
    flat = one.reshape(-1)
    every = -(-flat.numel() // (_ROW * _MOST_ROWS))
    part = flat if every <= 1 else flat[: flat.numel() // _ROW * _ROW].view(-1, _ROW)[int(signs.first * every) :: every]
    return part if part.dtype in (torch.float32, torch.float64) else part.float()


def _sum_of(part: torch.Tensor, signs: _Signs) -> torch.Tensor:
    """Return the sum of elements with signs, on their device."""
    elements, rows = signs.elements.to(part), signs.rows.to(part)
    whole = part if part.dim() > 1 else part[: len(part) // _ROW * _ROW].view(-1, _ROW)
    rest = part[whole.numel() :] if part.dim() == 1 else part.new_empty(0)
    return torch.dot(torch.mv(whole, elements), rows[: len(whole)]) + torch.dot(rest, elements[: len(rest)])


def _joined(sums: list[tuple[str, float, float]]) -> Iterator[tuple[str, float, float]]:
    """Add up sums of parameters that follow each other."""
    size = -(-len(sums) // _MOST_SUMS)
    for start in range(0, len(sums), size):
        part = sums[start : start + size]
        name = f"{part[0][0]} to {part[-1][0]}" if len(part) > 1 else part[0][0]
        yield name[:1024], sum(total for _, total, _ in part), math.hypot(*(slack for *_, slack in part))
