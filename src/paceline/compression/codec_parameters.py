"""Checks of codec parameters, which come from users and over the network."""

from __future__ import annotations


def check_number(codec: str, field: str, value: object, low: float, high: float) -> None:
    """Raise ValueError unless a codec's parameter is a number (not bool) in ``low`` to ``high``, both included."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{field} of codec {codec!r} is {value!r}; it must be a number in {low:g} to {high:g}")


def check_integer(codec: str, field: str, value: object, low: int, high: int) -> None:
    """Raise ValueError unless a codec's parameter is an int in ``low`` to ``high``, both included."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{field} of codec {codec!r} is {value!r}; it must be an integer in {low} to {high}")
