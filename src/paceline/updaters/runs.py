"""Runs: ranges of a stored value that an optimizer updates as one tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.updaters.flat import Piece
from paceline.updaters.spec import KeyOptions, Options


@dataclass(frozen=True)
class Run:
    """Adjacent pieces with the same options: one tensor for the optimizer."""

    start: int
    length: int
    shape: tuple[int, ...]
    options: KeyOptions
    place: tuple[str | int, int] | None = None
    """Key, and first element inside it, for optimizers that need it."""

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this range of a flat tensor; in the shape of the key if the optimizer needs it."""
        part = flat[self.start : self.start + self.length]
        return part.view(self.shape) if self.shape else part


def runs_of(
    pieces: Sequence[Piece],
    keys: Mapping[str | int, KeyOptions],
    *,
    whole: bool = False,
    per_key: bool = False,
    apart: Collection[int] = (),
) -> list[Run]:
    """Join adjacent pieces with equal options, but not at the positions ``apart``.

    An optimizer gets each key separately in its shape (``whole``), or with its name (``per_key``).
    """
    runs: list[Run] = []
    for piece in pieces:
        options = keys.get(piece.key, KeyOptions())
        last = runs[-1] if runs else None
        joins = not whole and not per_key and piece.start not in apart
        if joins and last is not None and last.options == options and last.start + last.length == piece.start:
            runs[-1] = Run(last.start, last.length + piece.length, (), options)
        else:
            place = (piece.key, piece.offset) if per_key else None
            runs.append(Run(piece.start, piece.length, piece.shape if whole else (), options, place))
    return runs


def group_of(options: KeyOptions, groups: Sequence[Options]) -> Options:
    """Return the param group of a key.

    Raises:
        ValueError: there is no such group.
    """
    if options.group >= len(groups):
        raise ValueError(f"param group {options.group} does not exist; the optimizer has {len(groups)}")
    return groups[options.group]


def completed(groups: Sequence[Options], usual: Sequence[Options]) -> list[Options]:
    """Return the options per param group of one step; options that it does not name are the usual ones."""
    if not groups:
        return list(usual)
    return [{**(usual[index] if index < len(usual) else {}), **group} for index, group in enumerate(groups)]
