"""Codecs, weightings, updaters, launchers, trackers and commands by name: ours, a program's own, those of packages.

| kind | object | entry points of packages |
|---|---|---|
| ``codec`` | a class derived from :class:`paceline.compression.Codec` | ``paceline.codecs`` |
| ``weighting`` | a function of staleness and history (:mod:`paceline.consistency`) | ``paceline.weightings`` |
| ``updater`` | a ``torch.optim.Optimizer`` class | ``paceline.updaters`` |
| ``launcher`` | a class with the methods of :class:`paceline.launch.Backend` | ``paceline.launchers`` |
| ``tracker`` | a class derived from :class:`paceline.observe.trackers.Tracker` | ``paceline.trackers`` |
| ``command`` | a function that a server runs (:mod:`paceline.server.commands`) | ``paceline.commands`` |

A name is found where it was registered (:func:`register`), and where a package is installed that has an entry point of
that name; such a package is imported when the name is asked for. A server runs no script, so it imports the
entries of its setting ``allow``: ``pkg.mod:Name``, comma separated (``paceline launch --allow pkg.mod:Name``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.naming import suggestion

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Group of the entry points of each kind.
GROUPS = {
    "codec": "paceline.codecs",
    "command": "paceline.commands",
    "launcher": "paceline.launchers",
    "tracker": "paceline.trackers",
    "updater": "paceline.updaters",
    "weighting": "paceline.weightings",
}

T = TypeVar("T")

_registered: dict[str, dict[str, Any]] = {kind: {} for kind in GROUPS}


def register(kind: str, name: str = "") -> Callable[[T], T]:
    """Return a decorator that makes a class or function known in this process, by default under its ``name``.

    Raises:
        ValueError: unknown kind, no name, or another class or function has it.
    """
    if kind not in GROUPS:
        raise ValueError(f"nothing of the kind {kind!r} can be registered{suggestion(kind, GROUPS)}")

    def note(thing: T) -> T:
        own = name or getattr(thing, "name", "")
        if not isinstance(own, str) or not own:
            raise ValueError(f"{_origin(thing)} has no name; give the {kind} one")
        known = _registered[kind].get(own)
        if known is not None and known is not thing and (_origin(known) != _origin(thing) or "<" in _origin(thing)):
            raise ValueError(f"a {kind} named {own!r} is registered already, by {_origin(known)}")
        _registered[kind][own] = thing
        return thing

    return note


def names(kind: str) -> list[str]:
    """Return the names that :func:`find` knows, sorted. Imports no package."""
    return sorted({*_registered[kind], *(point.name for point in _points(kind))})


def registered(kind: str) -> dict[str, Any]:
    """Return the objects that this process has registered or found so far, by name."""
    return dict(_registered[kind])


def find(kind: str, name: str, others: Collection[str] = (), what: str = "") -> Any:
    """Return the object of a name. For errors: other names that the caller knows, and what its users call the kind.

    Raises:
        ValueError: unknown name, or the package of the entry point cannot be imported.
    """
    if name in _registered[kind]:
        return _registered[kind][name]
    for point in (one for one in _points(kind) if one.name == name):
        package = point.value if point.dist is None else point.dist.name
        return register(kind, name)(_load(point.value, f"{kind} {name!r} of the package {package}"))
    known = suggestion(name.lower(), {*names(kind), *others})
    end = "" if known.endswith("?") else "."
    raise ValueError(
        f"unknown {what or kind} {name!r}{known}{end} Your own is found by paceline.register, by an entry point of the "
        f"group {GROUPS[kind]}, and on servers by `paceline launch --allow package.module:Name`"
    )


def load(path: str) -> Any:
    """Import the object of an import path, e.g. ``"mylib.optim:Lion"``. Its module may register things.

    Raises:
        ValueError: the path has another form, or cannot be imported.
    """
    if not all(path.partition(":")):
        raise ValueError(f"{path!r} is no import path; write package.module:Name")
    return _load(path, repr(path))


def load_all(paths: str) -> None:
    """Import the entries of the setting ``allow``.

    Raises:
        ValueError: as :func:`load`.
    """
    for path in split(paths):
        load(path)


def split(paths: str) -> list[str]:
    """Return the import paths of the setting ``allow``."""
    return [path.strip() for path in paths.split(",") if path.strip()]


def _points(kind: str) -> list[EntryPoint]:
    from importlib.metadata import entry_points  # a tenth of the start of the command line, which rarely asks

    return list(entry_points(group=GROUPS[kind]))


def _load(path: str, what: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what} cannot be imported: {error}") from error
    return found


def _origin(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', repr(thing))}"
