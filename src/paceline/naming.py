"""Suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

#: Share of equal characters above which a name is suggested. A name with one typing error has more, unless it is very
#: short. Different names that begin alike have less.
_CUTOFF = 0.75


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest known name, or the list of all known names."""
    names = sorted(known)
    near = nearest(name, names)
    return f"; did you mean {near!r}?" if near else f"; known are {', '.join(names)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant, or an empty string."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=_CUTOFF)), "")


def absent(module: str, known: Iterable[str], instead: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a ``__getattr__`` for a module: names that it does not have are errors that say what to use.

    Args:
        module: its name.
        known: the names that it has.
        instead: replacements for names that other libraries have in its place.
    """

    def refuse(name: str) -> NoReturn:
        way_out = f"; use {instead[name]}" if name in instead else suggestion(name, known)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{way_out}")

    return refuse
