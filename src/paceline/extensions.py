"""Codecs, weightings, updaters, launchers, trackers and commands by name: ours, a program's own, and packages'.

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

Servers and schedulers import nothing else of the user's. Libraries try to import packages that may not be there
(``cuda``): a file of that name in the working directory or a folder of ``PYTHONPATH`` would be run. So these folders
are not searched (:func:`hide_user_folders`), except while an entry of ``allow`` is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import PacelineError
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

_hidden: list[str] = []
"""Folders that :func:`hide_user_folders` has taken from ``sys.path``."""


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
    """Import the entries of the setting ``allow``, also from folders that are hidden.

    Raises:
        ValueError: as :func:`load`.
    """
    with _shown(_hidden):
        for path in split(paths):
            load(path)


def hide_user_folders() -> None:
    """Search the working directory and the user's folders of ``PYTHONPATH`` for no module any more.

    Folders with installed packages are searched as before: clusters name theirs in ``PYTHONPATH``.
    """
    directory = ""
    with contextlib.suppress(FileNotFoundError):  # it does not exist any more
        directory = os.getcwd()
    found = _user_folders(sys.path, os.environ.get("PYTHONPATH", ""), directory)
    sys.path[:] = [one for one in sys.path if one not in found]
    _hidden[:] = dict.fromkeys([*found, directory])


def _user_folders(path: Sequence[str], pythonpath: str, directory: str) -> list[str]:
    """Return entries of ``path`` that are the working directory or of ``PYTHONPATH``, and have no installed package."""
    standard = sysconfig.get_path("stdlib")
    first = path[: path.index(standard)] if standard in path else path
    named = {os.path.join(directory, one) for one in ("", *pythonpath.split(os.pathsep))}
    named |= {os.path.normpath(one) for one in named}
    return [one for one in first if os.path.join(directory, one) in named and not _has_packages(one)]


def _has_packages(folder: str) -> bool:
    """Return whether a folder has packages that were installed there, or this one."""
    place = Path(folder)
    is_ours = place.resolve() == Path(__file__).resolve().parents[1]
    return is_ours or place.is_file() or any(any(place.glob(f"*.{kind}")) for kind in ("dist-info", "egg-info"))


@contextlib.contextmanager
def _shown(folders: Sequence[str]) -> Iterator[None]:
    """Search folders after all others, inside a ``with`` block."""
    added = [one for one in folders if one not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        sys.path[:] = [one for one in sys.path if one not in added]


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
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} cannot be imported: {_why(error)}") from error
    return found


def made(what: str, thing: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a class or function of a package makes.

    Raises:
        PacelineError: it says what is wrong.
        ValueError: it raised anything else; the text begins with ``what``.
    """
    try:
        return thing(*arguments)
    except PacelineError:
        raise
    except Exception as error:
        raise ValueError(f"{what} cannot be used: {_why(error)}") from error


def _why(error: BaseException) -> str:
    """Return the text of an error of foreign code, also of one that has none, and its place."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, (ImportError, AttributeError)):  # a name is missing
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({place.filename}, line {place.lineno})"


def _origin(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', repr(thing))}"
