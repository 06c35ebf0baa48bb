"""Keys and values of calls, in one form. All checks of keys are here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

Key: TypeAlias = int | str
Keys: TypeAlias = Key | Sequence[Key]
#: One tensor, a list of device values of one key, or one of these per key.
Values: TypeAlias = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]

T = TypeVar("T")


def by_key(key: Keys, values: Values) -> dict[Key, list[torch.Tensor]]:
    """Return any accepted form of (keys, values) as the device values of each key.

    The values of a key that occurs more than once are joined. Keys are in the order of their first occurrence.

    Raises:
        TypeError: a key is not int or str, keys are of both kinds, or a value is not a tensor.
        ValueError: numbers of keys and values differ, or a key has no values.
    """
    if isinstance(key, int | str | np.integer):
        return {checked_key(key): _device_values(key, values)}
    keys = [checked_key(one) for one in key]
    check_kind(keys, keys[:1])
    if isinstance(values, torch.Tensor) or len(values) != len(keys):
        count = "one tensor" if isinstance(values, torch.Tensor) else f"{len(values)} values"
        raise ValueError(f"{len(keys)} keys but {count}; give a list with one value (or list of device values) per key")
    joined: dict[Key, list[torch.Tensor]] = {}
    for one, value in zip(keys, values, strict=True):
        joined.setdefault(one, []).extend(_device_values(one, value))
    return joined


def checked_key(key: Any) -> Key:
    """Return a key as a plain int or str: ``np.int64(3)`` is 3.

    Raises:
        TypeError: the key is neither int nor str.
    """
    if isinstance(key, str):
        return str(key)
    if isinstance(key, bool) or not isinstance(key, int | np.integer):
        raise TypeError(f"key {key!r} is {type(key).__name__}; keys are int or str")
    return int(key)


def check_kind(keys: Iterable[Key], known: Iterable[Key]) -> None:
    """Check that new keys are of the kind of a store's keys: all int or all str, as in MXNet.

    The names that an optimizer or a trainer gives its parameters do not count: a script's own keys may be int.

    Raises:
        TypeError: a key is of the other kind.
    """
    first = next(iter(known), None)
    for key in keys:
        if first is not None and isinstance(key, str) is not isinstance(first, str):
            raise TypeError(
                f"key {key!r} is {type(key).__name__}, but key {first!r} is {type(first).__name__}: the keys of one "
                "store are all int or all str; use one kind, or a second store"
            )


def checked_table(table: Mapping[Any, T]) -> dict[Key, T]:
    """Return a table by key, with plain keys.

    Raises:
        TypeError: a key is not int or str.
    """
    return {checked_key(key): value for key, value in table.items()}


def _device_values(key: Key, value: Any) -> list[torch.Tensor]:
    is_list = isinstance(value, Iterable) and not isinstance(value, torch.Tensor | np.ndarray)
    result = list(value) if is_list else [value]
    if not result:
        raise ValueError(f"key {key!r} has an empty list of values")
    for one in result:
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"the value of key {key!r} is {type(one).__name__}, not a tensor")
    return result
