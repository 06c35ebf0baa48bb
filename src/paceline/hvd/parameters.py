"""Names and groups of the parameters of a distributed optimizer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from paceline.collectives import world
from paceline.collectives.execute import shares
from paceline.collectives.negotiation.messages import OperationRequest
from paceline.collectives.process_sets import ProcessSet, members_of

#: Names and parameters.
Named = list[tuple[str, torch.nn.Parameter]]


def checked_names(optimizer: torch.optim.Optimizer, named: Sequence[Any] | None) -> Named:
    """Return names and parameters of an optimizer; names of positions where none are given.

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
    once = {id(param): (name, param) for name, param in reversed(named)}  # tied ones by the first of their names
    return [one for number, one in reversed(once.items()) if number in used]


def make_groups(
    groups: Any, named: Named, params: Sequence[torch.Tensor], process_set: ProcessSet
) -> list[list[torch.nn.Parameter]]:
    """Return groups of parameters that need gradients: so many, or those that are given.

    Raises:
        ValueError: a negative number, something else than tensors, or a parameter in two groups.
    """
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"groups is {groups}; it is a number of groups, 0 or more")
        return _split(groups, named, process_set)
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


def _split(count: int, named: Named, process_set: ProcessSet) -> list[list[torch.nn.Parameter]]:
    """Divide parameters into groups, in the order of the process set's first rank."""
    table = {name: param for name, param in named if param.requires_grad}
    order = list(table)
    if world.is_initialized() and process_set.included():
        set_id, members = members_of(process_set)
        raw = json.dumps(order).encode()
        request = OperationRequest("broadcast_object", "order of parameters", set_id, root=members[0], payload=raw)
        order = json.loads(world.current().background.call(request)[0])
    rest = iter(order)
    return [[table[name] for name in islice(rest, size)] for size in shares(len(order), min(count, len(order)))]
