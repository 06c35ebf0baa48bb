"""Compares the optimizer options of workers whose pushes make one update: these must be the same."""

from __future__ import annotations

from paceline.updaters import KeyOptions, StepOptions

_NONE = object()


def difference(one: StepOptions, other: StepOptions, first: int, second: int) -> str:
    """Return how the options of two workers differ; empty when they are the same.

    Args:
        one: options of the one.
        other: options of the other.
        first: rank of the one.
        second: rank of the other.
    """
    if len(one.groups) != len(other.groups):
        return f"worker {first} has {len(one.groups)} param groups and worker {second} has {len(other.groups)}"
    for number, (mine, theirs) in enumerate(zip(one.groups, other.groups, strict=True)):
        for name in sorted(mine.keys() | theirs.keys()):
            values = mine.get(name, _NONE), theirs.get(name, _NONE)
            if values[0] != values[1]:
                found = ["not set" if value is _NONE else value for value in values]
                return (
                    f"{name} of param group {number} is {found[0]} on worker {first} and {found[1]} on worker {second}"
                )
    return _of_keys(one.keys or {}, other.keys or {}, first, second)


def _of_keys(one: dict[str | int, KeyOptions], other: dict[str | int, KeyOptions], first: int, second: int) -> str:
    for key in sorted(one.keys() | other.keys(), key=str):
        mine, theirs = one.get(key, KeyOptions()), other.get(key, KeyOptions())
        for name in ("group", "lr_mult", "wd_mult"):
            values = getattr(mine, name), getattr(theirs, name)
            if values[0] != values[1]:
                return f"{name} of key {key!r} is {values[0]} on worker {first} and {values[1]} on worker {second}"
    return ""
