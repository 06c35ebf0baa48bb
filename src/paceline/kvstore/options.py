"""Options of the optimizer that a store runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.keys import checked_table
from paceline.updaters import Options, UpdaterSpec, option_groups
from paceline.updaters.updater_registry import SIMPLE, find_class


def plain_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``set_optimizer`` with plain keys in ``keys``."""
    result = dict(options)
    if result.get("keys"):
        result["keys"] = checked_table(result["keys"])
    return result


def no_optimizer(store: str, verb: str) -> ValueError:
    """Return the error about a store that runs no optimizer.

    Args:
        store: its type.
        verb: what was to be done with the optimizer's state or options.
    """
    return ValueError(
        f"the {store} store has no optimizer, so it has no state or options to {verb}; call set_optimizer. If a "
        'DistributedOptimizer or a Trainer steps in the workers (update="worker"), the state is theirs: '
        "paceline.save and paceline.load"
    )


def refuse_changes(spec: UpdaterSpec, groups: Sequence[Options]) -> None:
    """Raise if an updater has no options.

    Raises:
        ValueError: the store replaces stored values by pushes, or adds pushes to them.
    """
    if groups and spec.name in SIMPLE:
        raise ValueError(f"updater {spec.name!r} has no options to change; call set_optimizer")


def in_force(groups: Sequence[Options], cls: type[torch.optim.Optimizer] | None) -> list[Options]:
    """Return the options of every param group; options that were not given have the class's defaults.

    Args:
        groups: the given options per param group.
        cls: the optimizer's class; None: it has no defaults.
    """
    defaults = {} if cls is None else _defaults(cls)  # type: ignore[arg-type]  # mypy thinks classes not hashable
    return [{**defaults, **group} for group in groups or [{}]]


def class_of(spec: UpdaterSpec) -> type[torch.optim.Optimizer] | None:
    """Return the class that a spec names; None for updaters that are not optimizers, or that only servers load."""
    if spec.name in SIMPLE:
        return None
    try:
        return find_class(spec.name, allowed=[spec.name])
    except (ImportError, ValueError):
        return None


@functools.cache
def _defaults(cls: type[torch.optim.Optimizer]) -> Options:
    try:
        return option_groups(cls([torch.nn.Parameter(torch.zeros(1, 1))]))[0]  # type: ignore[call-arg]
    except TypeError:  # an option without a default, or with one that is not plain data
        return {}
