"""Values that a script has written to the devices' memory alone, or to one of the devices alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from operator import sub

import torch

from paceline.layout.tensors import real_view
from paceline.mx.gluon.parameter import Parameter
from paceline.optim.binding import same_bits

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
        self._sums = {key: _sums_of(parameters[key], self._step) for key in _some(parameters, self._step)}

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
            for pair in zip(sums, _sums_of(parameters[key], self._step), strict=True)
        ]
        others = set(_different(pairs))
        noted = [key for key in parameters if key in self._counts]
        return [key for key in noted if key in others or _counts(parameters[key]) != self._counts[key]]


class AlikeValues:
    """Notices values that differ between the devices: at once where torch counts the write, else after some steps.

    Devices of different types round differently, and are not compared.
    """

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._step = 0

    def note(self, parameters: Mapping[str, Parameter]) -> None:
        """Note that a step has given all devices the same values."""
        self._counts = {key: _counts(one) for key, one in parameters.items()}
        self._step += 1

    def unlike(self, parameters: Mapping[str, Parameter]) -> list[str]:
        """Return the keys of values that differ between devices."""
        counts = {key: (_counts(one), self._counts.get(key)) for key, one in parameters.items()}
        # One that has not been noted was not trained in the last step: grad_req was "null".
        written = [key for key, (now, then) in counts.items() if then is None or len(set(map(sub, now, then))) > 1]
        found = [key for key in written if not all(same_bits(*pair) for pair in _pairs(parameters[key].list_data()))]
        sums = {key: _sums_of(parameters[key], self._step) for key in _some(parameters, self._step)}
        return found + _different([(key, *pair) for key, some in sums.items() for pair in _pairs(some)])


def _pairs(copies: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the first copy and each other one, on its device; none of devices of different types."""
    first, *others = copies
    return [(first, one.to(first.device)) for one in others if one.device.type == first.device.type]


def _some(parameters: Mapping[str, Parameter], step: int) -> Iterable[str]:
    """Return the keys of the parameters whose elements are looked at in a step."""
    first = step * _EACH_STEP % max(len(parameters), 1)
    return itertools.islice(itertools.cycle(parameters), first, first + min(_EACH_STEP, len(parameters)))


def _sums_of(parameter: Parameter, step: int) -> list[torch.Tensor]:
    return [_sum_of_bits(one, step) for one in parameter.list_data()]


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
    """Return the keys of pairs of numbers that differ; numbers on one device are read in one copy."""
    found = [one != other for _, one, other in pairs]
    is_one = len({one.device for one in found}) == 1
    changed = torch.stack(found).tolist() if is_one else [bool(one) for one in found]
    return [key for (key, *_), is_changed in zip(pairs, changed, strict=True) if is_changed]
