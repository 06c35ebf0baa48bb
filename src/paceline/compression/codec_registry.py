"""Codecs by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from paceline import extensions
from paceline.compression.base import Codec


@extensions.register("codec", "none")
def _no_codec() -> None:
    """No compression."""


def known_codecs() -> list[str]:
    """Return the names that :func:`make` accepts, sorted."""
    return extensions.names("codec")


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
    build: Callable[..., Codec | None] = extensions.find("codec", str(name))
    _check_names(name, options, list(inspect.signature(build).parameters))
    try:
        return build(**options)
    except TypeError as error:
        raise ValueError(f"codec {name!r} cannot be built from {options}: {error}") from error


def _check_names(codec: str, options: Mapping[str, Any], known: list[str]) -> None:
    unknown = [str(name) for name in options if name not in known]
    if unknown:
        allowed = ", ".join(known) if known else "none"
        raise ValueError(f"codec {codec!r} has no parameter {', '.join(unknown)}; its parameters are: {allowed}")
