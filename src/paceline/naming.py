"""Names in texts: suggestions for unknown ones, and lists of known ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

#: Share of equal characters above which a name is suggested. A name with one typing error has more, unless it is very
#: short. Different names that begin equally have less.
_CUTOFF = 0.75

#: Workers, or runs of workers, in one text.
_MOST_RUNS = 12


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest known name, or the list of all known names."""
    names = sorted(known)
    near = nearest(name, names)
    return f"; did you mean {near!r}?" if near else f"; known are {', '.join(names)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant, or an empty string."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=_CUTOFF)), "")


def meant(text: str, names: Iterable[str]) -> list[str]:
    """Return the names that a text may mean, sorted: the one that it is, else all that begin with it."""
    known = sorted(set(names))
    return [text] if text in known else [name for name in known if name.startswith(text)]


def absent(module: str, known: Iterable[str], instead: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a ``__getattr__`` for a module: names that it does not have are errors that say what to use.

    ``instead`` has replacements for names that other libraries have in its place.
    """

    def refuse(name: str) -> NoReturn:
        way_out = f"; use {instead[name]}" if name in instead else suggestion(name, known)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{way_out}")

    return refuse


def listed(names: Iterable[object], most: int = 3, between: str = ", ") -> str:
    """Return the first names, and the number of further ones: ``a, b, c and 2 more``."""
    texts = list(map(str, names))
    return between.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def workers_text(ranks: Iterable[int]) -> str:
    """Return ``worker 3``, ``workers 0, 2``, ``workers 0-6, 8`` or ``no worker``."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    if not runs:
        return "no worker"
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    texts = (f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"worker{'' if is_one else 's'} {listed(texts, _MOST_RUNS)}"
