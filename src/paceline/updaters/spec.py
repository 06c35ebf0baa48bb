"""Optimizers as data: a registered name and numbers, so that nothing ever has to be unpickled."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import torch

from paceline.naming import suggestion
from paceline.updaters.registry import SIMPLE, check_name, find_class, name_of_class

Option: TypeAlias = bool | int | float | str | list[float] | None
Options: TypeAlias = dict[str, Option]

#: Options that say how torch computes, not what; where the values are stored this is our business.
_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"})


class KeyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which param group a key belongs to, and its multipliers."""

    group: int = 0
    lr_mult: float = 1.0
    wd_mult: float = 1.0


class StepOptions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The options of an optimizer at one step; they travel with every push."""

    groups: list[Options] = []
    """Options per param group; empty: those of the spec."""
    keys: dict[str | int, KeyOptions] | None = None
    """Keys that are not in group 0 with multipliers 1; None: those of the spec."""


class UpdaterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimizer or updater by name, with one dictionary of options per param group."""

    name: str = "assign"
    groups: list[Options] = msgspec.field(default_factory=lambda: [{}])
    keys: dict[str | int, KeyOptions] = {}
    """Keys that are not in group 0 with multipliers 1."""
    multi_precision: bool = False
    """Keep a float32 master of float16 and bfloat16 values."""


def plain(name: str, value: Any) -> Option:
    """Convert one option to plain data.

    Raises:
        TypeError: the option cannot be sent by value.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [float(part) for part in value]
    raise TypeError(
        f"optimizer option {name} is {type(value).__name__}; only numbers, strings and tuples of numbers can be sent"
    )


def option_groups(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return the options of every param group of an optimizer, as plain data."""
    return [
        {
            name: plain(name, value)
            for name, value in group.items()
            if name not in _IMPLEMENTATION and name != "param_names"
        }
        for group in optimizer.param_groups
    ]


def make_spec(
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer,
    *,
    keys: Mapping[str | int, KeyOptions] | None = None,
    multi_precision: bool = False,
    **options: Any,
) -> UpdaterSpec:
    """Describe an optimizer by its name and numbers.

    Args:
        optimizer: a name (``"adam"``), a class or an instance of ``torch.optim``, or of a user's class that the servers
            were allowed to load (``--allow-optimizer``). An instance brings its param groups.
        keys: param group and multipliers of keys that differ from group 0 and 1.0.
        multi_precision: keep a float32 master of half precision values.
        **options: options of the class; ``learning_rate`` is accepted for ``lr``, ``wd`` for ``weight_decay``.

    Raises:
        ValueError: unknown name, or an optimizer that cannot work on a server.
        TypeError: not an optimizer, an option that it does not have, or one that is not plain data.
    """
    if isinstance(optimizer, str):
        name = check_name(optimizer)
    elif isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        name = name_of_class(optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer):
        if options:
            raise TypeError(
                "options are given by the optimizer instance itself; pass a name or a class to set them here"
            )
        return UpdaterSpec(name_of_class(type(optimizer)), option_groups(optimizer), dict(keys or {}), multi_precision)
    else:
        raise TypeError(f"{optimizer!r} is not an optimizer: give a name, a torch.optim class or an instance")
    renamed = {_RENAMED.get(key, key): plain(key, value) for key, value in options.items()}
    _check_options(name, renamed)
    return UpdaterSpec(name, [renamed], dict(keys or {}), multi_precision)


def _check_options(name: str, options: Options) -> None:
    # torch takes any name into a param group, so a misspelt option would be ignored without a word.
    if name in SIMPLE or ":" in name:
        return
    known = set(inspect.signature(find_class(name)).parameters) - _IMPLEMENTATION
    for option in sorted(set(options) - known):
        raise TypeError(f"optimizer {name!r} has no option {option!r}{suggestion(option, known)}")


_RENAMED = {"learning_rate": "lr", "wd": "weight_decay"}
