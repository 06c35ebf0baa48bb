"""Names and groups of parameters, checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from paceline.hvd import world
from paceline.hvd.negotiation import Request

Named = list[tuple[str, torch.nn.Parameter]]


def checked_names(optimizer: torch.optim.Optimizer, named: Sequence[Any] | None) -> Named:
    """Return names and parameters of an optimizer.

    Args:
        optimizer: whose parameters must all be named.
        named: pairs; None: names are made of the positions.

    Raises:
        ValueError: no pairs, names that are there twice, or parameters without a name.
    """
    groups = optimizer.param_groups
    if not named:
        return [
            (f"allreduce.noname.{i}.{j}", param)
            for i, one in enumerate(groups)
            for j, param in enumerate(one["params"])
        ]
    if not all(isinstance(one, tuple) and len(one) == 2 for one in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    doubles = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if doubles:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(doubles)}")
    known = {id(param) for _, param in named}
    missing = [tuple(param.shape) for one in groups for param in one["params"] if id(param) not in known]
    if missing:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: shapes {missing}"
        )
    used = {id(param) for one in groups for param in one["params"]}
    return [(name, param) for name, param in named if id(param) in used]


def make_groups(groups: Any, named: Named, params: Sequence[torch.Tensor]) -> list[list[torch.nn.Parameter]]:
    """Return groups of parameters.

    Args:
        groups: a number of groups, lists of parameters, or None.
        named: names and parameters.
        params: all parameters of the optimizer.

    Raises:
        ValueError: a negative number, something else than tensors, or a parameter in two groups.
    """
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"groups is {groups}; it is a number of groups, 0 or more")
        return _split(groups, named)
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise ValueError("groups is a number, or a list of lists of parameters")
    seen: set[int] = set()
    known = {id(param) for param in params}
    for param in (param for group in groups for param in group):
        if not isinstance(param, torch.Tensor):
            raise ValueError(f"groups must consist of tensors, not {type(param).__name__}")
        if id(param) in seen:
            raise ValueError("a parameter is in two groups")
        if id(param) not in known:
            raise ValueError("a parameter of a group is none of the optimizer's")
        seen.add(id(param))
    return [[param for param in group if param.requires_grad] for group in groups if group]


def _split(count: int, named: Named) -> list[list[torch.nn.Parameter]]:
    """Divide parameters into groups, in rank 0's order."""
    table = {name: param for name, param in named if param.requires_grad}
    order = list(table)
    if world.is_initialized() and world.current().size > 1:
        request = Request("broadcast_object", "order of parameters", root=0, payload=json.dumps(order).encode())
        order = json.loads(world.running().call(request)[0])
    count = min(count, len(order))
    each, more = divmod(len(order), max(1, count))
    found, start = [], 0
    for number in range(count):
        stop = start + each + (number < more)
        found.append([table[name] for name in order[start:stop]])
        start = stop
    return found
