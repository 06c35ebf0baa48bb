"""Names of parameters. Workers match keys by them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def name_parameters(
    groups: Sequence[dict[str, Any]], named: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.nn.Parameter, int]]:
    """Return (name, parameter, group) of every parameter of an optimizer, in forward order if it is known.

    Frozen parameters are included: they may be trained later.

    Args:
        groups: the optimizer's ``param_groups``.
        named: names of the parameters, e.g. ``model.named_parameters()``; without it, names are positions.

    Raises:
        ValueError: a name occurs twice, a parameter has none, or its shape is not known yet.
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
        table = list(named)
        double = next((name for name, number in Counter(name for name, _ in table).items() if number > 1), None)
        if double is not None:
            raise ValueError(f"two parameters are named {double!r}; keys are matched by name, so names must differ")
        found = [(name, params[id(param)], group_of[id(param)]) for name, param in table if id(param) in params]
        if len(found) < len(params):
            raise ValueError(f"{len(params) - len(found)} parameters of the optimizer have no name; name all of them")
    for name, param, _ in found:
        if torch.nn.parameter.is_lazy(param):
            raise ValueError(f"parameter {name!r} has no shape yet (a lazy layer); run one forward pass first")
    return found
