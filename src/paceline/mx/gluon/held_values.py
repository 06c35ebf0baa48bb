"""Which values are as in the store that holds them: others were written where the store does not see it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch

from paceline.mx.gluon.parameter import Parameter
from paceline.tensors import real_view

#: Parameters whose elements are looked at in a step, in turn; and most elements of each, a part that moves on, too.
_EACH_STEP, _MOST_ELEMENTS = 4, 1 << 18


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HeldValues:
    """Notices changes by torch's count of them; and by the elements of some parameters, for writes through ``.data``.

    So it finds each change that torch counts, each that concerns all parameters, and after some steps each other one
    that is made again and again.
    """

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._step = 0

    def note(self, parameters: Mapping[str, Parameter]) -> None:
        """Note that values are as in the store."""
        self._counts |= {key: _counts(one) for key, one in parameters.items()}
        self._step += 1
        first = self._step * _EACH_STEP % max(len(parameters), 1)
        some = itertools.islice(itertools.cycle(parameters), first, first + min(_EACH_STEP, len(parameters)))
        self._sums = {key: self._sums_of(parameters[key]) for key in some}

    def forget(self, keys: Iterable[str]) -> None:
        """Note that it is not known whether values are as in the store."""
        for key in keys:
            self._counts.pop(key, None)
            self._sums.pop(key, None)

    def changed(self, parameters: Mapping[str, Parameter]) -> list[str]:
        """Return the keys of values that have changed since they were noted."""
        pairs = [
            (key, *pair)
            for key, sums in self._sums.items()
            if key in parameters
            for pair in zip(sums, self._sums_of(parameters[key]), strict=True)
        ]
        others = set(_different(pairs))
        noted = [key for key in parameters if key in self._counts]
        return [key for key in noted if key in others or _counts(parameters[key]) != self._counts[key]]

    def _sums_of(self, parameter: Parameter) -> list[torch.Tensor]:
        return [_sum_of_bits(one, self._step) for one in parameter.list_data()]


def _counts(parameter: Parameter) -> list[int]:
    return [one._version for one in parameter.on_devices()]


def _sum_of_bits(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Return a number that is another one, almost surely, once an element of the step's part has changed."""
    flat = real_view(tensor).reshape(-1)
    parts = -(-flat.numel() // _MOST_ELEMENTS)
    if parts > 1:
        flat = flat[step % parts * _MOST_ELEMENTS :][:_MOST_ELEMENTS]
    return flat.view(_INTEGERS[flat.itemsize]).sum()


def _different(pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
    """Return the keys of pairs of numbers that differ; those of one device are read in one copy."""
    found = [one != other for _, one, other in pairs]
    is_one = len({one.device for one in found}) == 1
    changed = torch.stack(found).tolist() if is_one else [bool(one) for one in found]
    return [key for (key, *_), is_changed in zip(pairs, changed, strict=True) if is_changed]
