"""Sets of positions as ranges ``(start, stop)``: ascending, not empty, and no two that touch. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
Ranges: TypeAlias = tuple[Range, ...]


def joined(ranges: Iterable[Range]) -> Ranges:
    """Return all positions of any ranges."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Return the positions that are in both."""
    if one == other:
        return one
    return joined((max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) < min(b, d))


def within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the positions in ``[start, stop)``, counted from ``start``."""
    return tuple((max(a, start) - start, min(b, stop) - start) for a, b in ranges if max(a, start) < min(b, stop))


def without(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the positions that are not in ``[start, stop)``."""
    cut = [(a, min(b, start)) for a, b in ranges] + [(max(a, stop), b) for a, b in ranges]
    return joined((a, b) for a, b in cut if a < b)


def is_all(ranges: Ranges, length: int) -> bool:
    """Tell whether all positions from 0 to ``length`` are in."""
    return ranges == ((0, length),)


def everything(length: int) -> Ranges:
    """Return all positions from 0 to ``length``."""
    return ((0, length),) if length else ()


def others(ranges: Ranges, length: int) -> Ranges:
    """Return the positions from 0 to ``length`` that are not in."""
    found = everything(length)
    for start, stop in ranges:
        found = without(found, start, stop)
    return found


def cut(ranges: Ranges, count: int) -> tuple[Ranges, Ranges]:
    """Return the first positions, and the rest."""
    first: list[Range] = []
    rest: list[Range] = []
    for start, stop in ranges:
        middle = min(stop, start + count)
        first += [(start, middle)] if start < middle else []
        rest += [(middle, stop)] if middle < stop else []
        count -= middle - start
    return tuple(first), tuple(rest)
