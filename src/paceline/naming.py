"""Suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

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


def absent(module: str, name: str, known: Iterable[str], instead: Mapping[str, str] | None = None) -> AttributeError:
    """Return the error for a name that a module does not have.

    Args:
        module: its name.
        name: the name that it does not have.
        known: the names that it has.
        instead: replacements for names that other libraries have in its place.
    """
    way_out = f"; use {instead[name]}" if instead and name in instead else suggestion(name, known)
    return AttributeError(f"module {module!r} has no attribute {name!r}{way_out}")
