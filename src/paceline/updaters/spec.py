"""Optimizers as data: a registered name and numbers. So no object is ever unpickled."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch

from paceline.naming import suggestion
from paceline.updaters import gradient
from paceline.updaters.classes import check_name, find_class, name_of_class

Option: TypeAlias = bool | int | float | str | list[float | None] | None
Options: TypeAlias = dict[str, Option]

#: Options that are never infinite. Others may be: the first step of ASGD's average, the largest step of Rprop, limits
#: of a user's own class.
_FINITE = frozenset(
    {
        "lr", "momentum", "dampening", "weight_decay", "betas", "eps", "lr_decay", "momentum_decay", "alpha", "rho",
        "lambd", "etas", "beta", "initial_accumulator_value", "trust_coefficient", "lamda", "lamda1", "wd_lh", "rate",
    }
)  # fmt: skip

#: Entries of a param group that do not change an update, most of them options of how torch computes. The store sets
#: these itself, and workers on different machines may differ in them.
IMPLEMENTATION = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"})

#: Types of options that are plain data as they are.
_PLAIN = frozenset({float, int, bool, str, type(None)})


class KeyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The param group of a key, and its multipliers."""

    group: int = 0
    lr_mult: float = 1.0
    wd_mult: float = 1.0


class StepOptions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The options of an optimizer at one step. They are sent with every push."""

    groups: list[Options] = []
    """Options per param group; empty: the spec's."""
    keys: dict[str | int, KeyOptions] | None = None
    """Keys that are not in group 0 with multipliers 1; None: the spec's."""


class UpdaterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimizer or updater by name, with one dictionary of options per param group."""

    name: str = "assign"
    groups: list[Options] = msgspec.field(default_factory=lambda: [{}])
    keys: dict[str | int, KeyOptions] = {}
    """Keys that are not in group 0 with multipliers 1."""
    multi_precision: bool = False
    """Keep a float32 master of float16 and bfloat16 values."""


def check_numbers(groups: Sequence[Options], keys: Mapping[Any, KeyOptions] | None = None) -> None:
    """Check all numbers of an optimizer: torch accepts a NaN, and all weights become NaN.

    Raises:
        TypeError: an option of the gradient is not a number.
        ValueError: a number is NaN, is infinite where that makes no sense, or is out of range.
    """
    gradient.check(groups)
    for group in groups:
        for name, value in group.items():
            _check_finite(name, value if isinstance(value, list) else [value], name in _FINITE)
    for key, one in (keys or {}).items():
        for name in ("lr_mult", "wd_mult"):
            _check_finite(f"{name} of key {key!r}", [getattr(one, name)], True)


def _check_finite(what: str, values: Iterable[Any], bounded: bool) -> None:
    for value in values:
        if isinstance(value, float) and (math.isnan(value) or (bounded and math.isinf(value))):
            raise ValueError(f"{what} is {value}, not a finite number")


def plain(name: str, value: Any) -> Option:
    """Convert one option to plain data.

    Raises:
        TypeError: the option cannot be sent by value.
    """
    if value is None or isinstance(value, float | bool | int | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.item())
    if isinstance(value, tuple | list) and not any(isinstance(part, str) for part in value):
        return [None if part is None else float(part) for part in value]  # Adafactor has a None in its eps
    raise TypeError(
        f"optimizer option {name} is {type(value).__name__}; only numbers, strings and tuples of numbers can be sent"
    )


def option_groups(optimizer: torch.optim.Optimizer, *, skips: bool = False) -> list[Options]:
    """Return the options of every param group of an optimizer, as plain data.

    Args:
        optimizer: any optimizer.
        skips: options that cannot be sent by value are left out.

    Raises:
        TypeError: an option cannot be sent by value.
    """
    found = []
    for group in optimizer.param_groups:
        options: Options = {}
        for name, value in group.items():
            if name in IMPLEMENTATION:
                continue
            try:
                options[name] = value if type(value) in _PLAIN else plain(name, value)
            except (TypeError, ValueError):
                if not skips:
                    raise
        found.append(options)
    return found


def make_spec(
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer,
    *,
    keys: Mapping[str | int, KeyOptions] | None = None,
    multi_precision: bool = False,
    momentum_form: str = "torch",
    **options: Any,
) -> UpdaterSpec:
    """Describe an optimizer by its name and numbers.

    Args:
        optimizer: a name (``"adam"``), a class or an instance of ``torch.optim``, or of a user's class that the servers
            may load (``--allow``). The param groups of an instance are used.
        keys: param group and multipliers of keys that differ from group 0 and 1.0.
        multi_precision: keep a float32 master of half precision values.
        momentum_form: form of ``sgd``: ``"torch"``, v = momentum * v + g; w -= lr * v, or ``"mxnet"``,
            v = momentum * v - lr * g; w += v. They differ when the rate changes: in torch's form the new rate applies
            at once to all past gradients in v, in MXNet's form only to later gradients.
        **options: options of the class; ``learning_rate`` is accepted for ``lr``, ``wd`` for ``weight_decay``. Every
            optimizer and updater also has ``rescale_grad``, a factor on the merged gradient, and ``clip_gradient``, the
            largest absolute value of its elements after that, before weight decay. ``lazy_update=True`` of MXNet is
            how all of them treat sparse gradients (:data:`~paceline.updaters.rows.LAZY`).

    Raises:
        ValueError: the name is unknown, the optimizer cannot run on a server, or a number is out of range.
        TypeError: not an optimizer, an option that it does not have, or one that is not plain data.
    """
    if isinstance(optimizer, str) and ":" not in optimizer and not options.pop("lazy_update", True):
        raise ValueError(
            "lazy_update=False: sparse gradients change only their rows here. To update all rows, make the gradient "
            "dense: sparse=False of nn.Embedding, sparse_grad=False in Gluon"
        )
    renamed = {_RENAMED.get(key, key): plain(key, value) for key, value in options.items()}
    check_numbers([renamed], keys)
    own = gradient.without(renamed)
    if isinstance(optimizer, torch.optim.Optimizer):
        if own or momentum_form != "torch":
            raise TypeError(
                "options are given by the optimizer instance itself; pass a name or a class to set them here"
            )
        groups = [group | renamed for group in option_groups(optimizer)]
        check_numbers(groups)
        return UpdaterSpec(name_of_class(type(optimizer)), groups, dict(keys or {}), multi_precision)
    name = _with_form(_name_of(optimizer), momentum_form)
    if ":" not in name:
        _check_names(name, find_class(name), own)
    elif not isinstance(optimizer, str):  # servers check the options of a class that only they load
        _check_names(name, optimizer, own)
    return UpdaterSpec(name, [renamed], dict(keys or {}), multi_precision)


def _name_of(optimizer: Any) -> str:
    if isinstance(optimizer, str):
        return check_name(optimizer)
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return name_of_class(optimizer)
    raise TypeError(f"{optimizer!r} is not an optimizer: give a name, a torch.optim class or an instance")


def _with_form(name: str, momentum_form: str) -> str:
    if momentum_form not in ("torch", "mxnet"):
        raise ValueError(f"momentum_form is {momentum_form!r}, but can be 'torch' or 'mxnet'")
    if momentum_form == "torch":
        return name
    if name not in ("sgd", "mxnet_sgd"):
        raise ValueError(f"momentum_form is an option of 'sgd', not of {name!r}")
    return "mxnet_sgd"


def _check_names(name: str, cls: type[torch.optim.Optimizer], options: Options) -> None:
    # torch accepts any name in a param group, so a misspelt option would be silently ignored.
    parameters = inspect.signature(cls).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    known = set(parameters) - IMPLEMENTATION
    for option in sorted(set(options) - known):
        raise TypeError(f"optimizer {name!r} has no option {option!r}{suggestion(option, known)}")


def check_options(cls: type[torch.optim.Optimizer], groups: Sequence[Options]) -> None:
    """Check the options of every group with the class. Torch itself only checks the options of the first call.

    Raises:
        ValueError: the class rejects an option's value.
    """
    known = inspect.signature(cls.__init__).parameters
    for group in groups:
        options = tuples({name: group[name] for name in group if name in known})
        try:
            cls([_any_parameter()], **options)
        except (TypeError, LookupError, AttributeError) as error:  # of a value with another type or length
            raise ValueError(f"the options {options} do not fit {cls.__name__}: {error}") from error


def _any_parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))


@functools.cache
def defaults_of(cls: type[torch.optim.Optimizer]) -> Options:
    """Return the options of a class that were not given; none if one of them has no default, or is not plain data."""
    try:
        return option_groups(cls([_any_parameter()]))[0]  # type: ignore[call-arg]
    except TypeError:
        return {}


def tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as torch's classes need them: tuples instead of lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


#: By how much of itself an option may differ between workers, and by how much a small one.
_ROUNDING, _ROUNDING_OF_SMALL = 1e-9, 1e-15

_RENAMED = {"learning_rate": "lr", "wd": "weight_decay"}


def options_apart(one: StepOptions, other: StepOptions, first: int, second: int) -> str:
    """Return how the options of two workers differ; empty when they are the same, to rounding.

    Different machines compute a schedule's cosine with other last bits. The text names both ranks.
    """
    if len(one.groups) != len(other.groups):
        return f"worker {first} has {len(one.groups)} param groups and worker {second} has {len(other.groups)}"
    pairs: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        (f"param group {number}", *both) for number, both in enumerate(zip(one.groups, other.groups, strict=True))
    ]
    mine, theirs = one.keys or {}, other.keys or {}
    for key in sorted(mine.keys() | theirs.keys(), key=str):
        pairs.append((f"key {key!r}", _of_key(mine, key), _of_key(theirs, key)))
    for what, left, right in pairs:
        for name in sorted(left.keys() | right.keys()):
            values = left.get(name, "not set"), right.get(name, "not set")
            if not _is_same(*values):
                return f"{name} of {what} is {values[0]} on worker {first} and {values[1]} on worker {second}"
    return ""


def _is_same(one: Any, other: Any) -> bool:
    """Tell whether two options are the same, or numbers that differ by rounding."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(_is_same, one, other))
    if type(one) is type(other) is float:
        return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING_OF_SMALL) or one != one != other
    return bool(one == other)


def _of_key(keys: Mapping[str | int, KeyOptions], key: str | int) -> Mapping[str, Any]:
    one = keys.get(key, KeyOptions())
    return {"group": one.group, "lr_mult": one.lr_mult, "wd_mult": one.wd_mult}
