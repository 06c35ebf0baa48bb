"""Options of one backend: ``-o NAME=VALUE``."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from paceline.naming import nearest

T = TypeVar("T")


def backend_options(backend: str, known: Mapping[str, str], given: Mapping[str, str]) -> Mapping[str, str]:
    """Check the options of a backend and return them.

    Args:
        backend: its name, for messages.
        known: meaning of each option.
        given: the user's options.

    Raises:
        ValueError: one is unknown; the message lists what there is.
    """
    for name in given:
        if name not in known:
            _refuse(backend, name, known, "; ".join(f"{one}: {text}" for one, text in known.items()))
    return given


def typed_options(backend: str, form: type[T], given: Mapping[str, str]) -> T:
    """Return the options of a backend as a dataclass.

    Args:
        backend: its name, for messages.
        form: a dataclass; its fields, with hyphens, are the names. Each is a ``str``, ``int``, ``float``, or a tuple of
            ``str``, which is written with commas.
        given: the user's options.

    Raises:
        ValueError: an unknown name, or a value that cannot be.
    """
    types = {name.replace("_", "-"): kind for name, kind in typing.get_type_hints(form).items()}
    values: dict[str, Any] = {}
    for name, text in given.items():
        plain = name.replace("_", "-")
        if plain not in types:
            _refuse(backend, name, types, ", ".join(types))
        values[plain.replace("-", "_")] = _value(plain, types[plain], text)
    return form(**values)


def _value(name: str, kind: Any, text: str) -> Any:
    if kind not in (str, int, float):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"-o {name}={text} is not a {'whole ' if kind is int else ''}number") from None


def _refuse(backend: str, name: str, known: Iterable[str], there: str) -> None:
    if not there:
        raise ValueError(f"launcher {backend!r} has no options: leave out -o {name}=...")
    meant = nearest(name, known)
    if meant:
        raise ValueError(f"launcher {backend!r} has no option {name!r}; did you mean {meant!r}?")
    raise ValueError(f"launcher {backend!r} has no option {name!r}; it has {there}")
