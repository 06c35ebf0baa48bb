"""Codecs by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from paceline.compression.base import Codec
from paceline.naming import suggestion

NONE = "none"
CodecClass = TypeVar("CodecClass", bound=type[Codec])

_codecs: dict[str, type[Codec]] = {}


def register(cls: CodecClass) -> CodecClass:
    """Make a codec class known to :func:`make` under its ``name`` (a class decorator).

    Servers decode what workers encode: register a codec of your own in both.

    Raises:
        ValueError: the class has no name, or another class has it.
    """
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name or name == NONE:
        raise ValueError(f"{cls.__qualname__}.name is {name!r}; give the codec a name other than {NONE!r}")
    known = _codecs.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"a codec named {name!r} is registered already, by {known.__module__}.{known.__qualname__}")
    _codecs[name] = cls
    return cls


def known_codecs() -> list[str]:
    """Return the names that :func:`make` accepts, sorted."""
    return sorted([*_codecs, NONE])


def make(params: Mapping[str, Any] | str | None) -> Codec | None:
    """Build the codec that compression settings describe.

    Args:
        params: a mapping with ``type`` and the codec's parameters (``{"type": "2bit", "threshold": 0.5}``), a type
            alone, or None.

    Returns:
        The codec, or None for None and ``"none"``.

    Raises:
        ValueError: no or unknown ``type`` (the nearest is suggested), unknown, missing or unusable parameters.
    """
    if params is None:
        return None
    options = {"type": params} if isinstance(params, str) else dict(params)
    name = options.pop("type", None)
    if name is None:
        raise ValueError(f"compression settings {params!r} have no 'type'; known types are {', '.join(known_codecs())}")
    if name == NONE:
        _check_names(NONE, options, [])
        return None
    cls = _codecs.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"unknown compression type {name!r}{suggestion(str(name).lower(), known_codecs())}")
    _check_names(name, options, list(inspect.signature(cls).parameters))
    return _built(cls, options)


def _built(cls: type[Codec], options: dict[str, Any]) -> Codec:
    try:
        return cls(**options)
    except TypeError as error:
        raise ValueError(f"codec {cls.name!r} cannot be built from {options}: {error}") from error


def _check_names(codec: str, options: Mapping[str, Any], known: list[str]) -> None:
    unknown = [str(name) for name in options if name not in known]
    if unknown:
        allowed = ", ".join(known) if known else "none"
        raise ValueError(f"codec {codec!r} has no parameter {', '.join(unknown)}; its parameters are: {allowed}")
