"""Options of distributed stores by type: for :func:`paceline.kvstore.create`, and for type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict


class StoreOptions(TypedDict, total=False):
    """Options of every distributed store."""

    mean: bool
    namespace: str | None


class WeightedOptions(StoreOptions, total=False):
    """Options of stores whose updates may be stale."""

    weighting: str | None
    lr_scale: Literal["update", "sample"] | None


class AsyncOptions(WeightedOptions, total=False):
    """Options of ``dist_async``."""

    age: int | None


class BoundedOptions(AsyncOptions, total=False):
    """Options of ``dist_ssync``."""

    staleness: int | None


class FirstKOptions(BoundedOptions, total=False):
    """Options of ``dist_ksync``."""

    k: int | None
    grace_s: float | None


class GroupedOptions(WeightedOptions, total=False):
    """Options of ``dist_gsync``."""

    staleness: int | None
    groups: str | Path | Sequence[Sequence[int | str]] | None


#: Names of the options of each type.
OPTIONS: Mapping[str, frozenset[str]] = {
    name: kind.__optional_keys__
    for name, kind in {
        "dist_sync": StoreOptions,
        "dist_async": AsyncOptions,
        "dist_ssync": BoundedOptions,
        "dist_gsync": GroupedOptions,
        "dist_ksync": FirstKOptions,
        "dist_auto": StoreOptions,
    }.items()
}
