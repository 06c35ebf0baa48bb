"""Names of an optimizer's parameters. Workers match keys by them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import chain, count
from typing import Any, TypeAlias

import torch

NamedParameter: TypeAlias = tuple[str, torch.nn.Parameter, int]
"""Name, parameter and index of its param group."""


def name_parameters(
    groups: Sequence[dict[str, Any]], named: Iterable[tuple[str, torch.Tensor]] | None
) -> list[NamedParameter]:
    """Return (name, parameter, group) of every parameter of an optimizer, in forward order if it is known.

    Frozen parameters are included: they may be trained later. Integers, as those of quantised layers, are not. Of
    several names of a parameter the first counts.

    Names are those of ``named``, e.g. ``model.named_parameters()``; without it, they are positions.

    Raises:
        ValueError: two parameters have one name, a parameter has none, or its shape is not known yet.
    """
    group_of = {id(param): index for index, group in enumerate(groups) for param in group["params"]}
    params = {id(param): param for group in groups for param in group["params"]}
    if named is None:
        found = [
            (f"group{index}.{position}", param, index)
            for index, group in enumerate(groups)
            for position, param in enumerate(group["params"])
        ]
    else:
        names: dict[int, str] = {}
        for name, param in named:
            if id(param) in params:
                names.setdefault(id(param), name)
        double = next((name for name, number in Counter(names.values()).items() if number > 1), None)
        if double is not None:
            raise ValueError(f"two parameters are named {double!r}; keys are matched by name, so names must differ")
        found = [(name, params[one], group_of[one]) for one, name in names.items()]
        if len(found) < len(params):
            raise ValueError(
                f"{len(params) - len(found)} parameters of the optimizer have no name; name all of them, those beside "
                "the model too: named_parameters=[*model.named_parameters(), ('scale', scale)]"
            )
    return _with_shapes(found)


def name_added(
    groups: Sequence[dict[str, Any]], named: Iterable[tuple[str, torch.Tensor]], known: Sequence[NamedParameter]
) -> list[NamedParameter]:
    """Return (name, parameter, group) of the parameters that are not known yet; no name is used twice.

    A layer that replaces another one has its name in the model, while the optimizer still has the other one's
    parameters. So a name that is taken gets a number. Parameters that are not among ``named`` are named by position.
    """
    names = {id(param): name for name, param in named}
    taken, old = {name for name, _, _ in known}, {id(param) for _, param, _ in known}
    found = []
    for index, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in old and may_have_gradient(param):
                name = _free(names.get(id(param), f"group{index}.{position}"), taken)
                taken.add(name)
                found.append((name, param, index))
    return _with_shapes(found)


def _free(name: str, taken: Container[str]) -> str:
    return next(one for one in chain([name], (f"{name} ({number})" for number in count(2))) if one not in taken)


def may_have_gradient(param: torch.Tensor) -> bool:
    """Return whether a parameter may be trained, now or later: not one of integers."""
    return param.is_floating_point() or param.is_complex()


def _with_shapes(found: list[NamedParameter]) -> list[NamedParameter]:
    for name, param, _ in found:
        if torch.nn.parameter.is_lazy(param):
            raise ValueError(f"parameter {name!r} has no shape yet (a lazy layer); run one forward pass first")
    return [one for one in found if may_have_gradient(one[1])]
