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

from paceline.tensors import real_view

#: Steps between two comparisons, at most. Before that they are powers of 2. One costs less than a tenth of a step.
_INTERVAL = 512

#: Part of a weight that may differ after one step, and after many; and the same in units of the type's rounding.
_ROUNDING, _MOST, _MOST_UNITS = 3e-4, 1e-2, 16

#: Parts of a step's sums. Parameters of models that have more are added up in turns.
_MOST_SUMS = 512

#: Elements of small parameters, relative to those of all parameters, whose rounding is also that of larger values.
_SMALL = 0.1

#: Signs of a row of elements.
_ROW = 4096


def is_due(step: int) -> bool:
    """Return whether weights are compared after this step, counted from 1."""
    return step & (step - 1) == 0 or step % _INTERVAL == 0


def sums_of(weights: Mapping[str, torch.Tensor], step: int) -> list[tuple[str, float, float]]:
    """Return the name of each parameter, its sum, and by how much that may differ on another machine.

    Args:
        weights: tensors by name, at least one.
        step: number of the step, which is the same on all workers.
    """
    named = {name: real_view(one).detach() for name, one in weights.items() if one.layout is torch.strided}
    signs, rows = _signs(step, max((one.numel() for one in named.values()), default=0))
    found = [(name, one, *_summed(one, signs, rows)) for name, one in named.items()]
    norms = _floats([norm for *_, norm in found])
    elements = sum(one.numel() for one in named.values())
    usual = math.sqrt(sum(norm * norm for norm in norms if math.isfinite(norm)) / max(elements, 1))
    sums = []
    for (name, one, *_), total, norm in zip(found, _floats([total for _, _, total, _ in found]), norms, strict=True):
        size = norm + _SMALL * usual * math.sqrt(one.numel())
        sums.append((name, total, _part(one.dtype, step) * size if math.isfinite(norm) else math.inf))
    return sums if len(sums) <= _MOST_SUMS else list(_joined(sums))


def _part(dtype: torch.dtype, step: int) -> float:
    """Return the part of a weight by which machines may differ after so many steps."""
    units = _MOST_UNITS * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return max(min(_MOST, _ROUNDING * math.sqrt(step)), units)


def _signs(step: int, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the signs of the elements of a row, and those of rows."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(2, (_ROW + largest // _ROW,), generator=generator).float().mul_(2).sub_(1)
    return drawn[:_ROW], drawn[_ROW:]


def _summed(one: torch.Tensor, signs: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a tensor with signs, and its norm, on its device."""
    flat = one.reshape(-1)
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    signs, rows = signs.to(flat), rows.to(flat)
    whole = flat.numel() // _ROW
    total = torch.dot(flat[whole * _ROW :], signs[: flat.numel() % _ROW])
    if whole:
        total = total + torch.dot(torch.mv(flat[: whole * _ROW].view(whole, _ROW), signs), rows[:whole])
    return total, torch.linalg.vector_norm(flat)


def _floats(values: list[torch.Tensor]) -> list[float]:
    """Return the values as numbers; those of one device in one copy."""
    if len({(one.device, one.dtype) for one in values}) == 1:
        return torch.stack(values).tolist()
    return [one.item() for one in values]


def _joined(sums: list[tuple[str, float, float]]) -> Iterator[tuple[str, float, float]]:
    """Add up sums of parameters that follow each other."""
    size = -(-len(sums) // _MOST_SUMS)
    for start in range(0, len(sums), size):
        part = sums[start : start + size]
        name = f"{part[0][0]} to {part[-1][0]}" if len(part) > 1 else part[0][0]
        yield name[:1024], sum(total for _, total, _ in part), math.hypot(*(slack for *_, slack in part))
