"""Suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Share of equal characters above which a name is suggested. A name with one typing error has more, unless it is very
#: short. Different names that begin alike have less.
_CUTOFF = 0.75


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest known name, or the list of all known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=_CUTOFF)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(names)}"
