"""Codecs by name, and the way that each works on: pushes, pulls, or both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from paceline import extensions
from paceline.compression.base import Codec

Leg: TypeAlias = Literal["push", "pull"]
#: Settings of one codec, or of one for each leg.
Compression: TypeAlias = Mapping[str, Any] | str | Sequence[Mapping[str, Any] | str]

_LEGS: dict[str, tuple[Leg, ...]] = {"push": ("push",), "pull": ("pull",), "both": ("push", "pull")}


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


def by_leg(params: Compression | None) -> dict[Leg, Codec]:
    """Return the codec of each leg that compression settings name.

    Args:
        params: what :func:`paceline.compression.make` takes, with ``leg`` besides (``push``, the default, ``pull`` or
            ``both``); or a list of such settings, for a codec of its own on each leg.

    Raises:
        ValueError: unknown leg, two codecs for one leg, or as :func:`paceline.compression.make`.
    """
    found: dict[Leg, Codec] = {}
    for one in [params] if params is None or isinstance(params, str | Mapping) else params:
        legs, codec = _parsed(one)
        for leg in legs if codec is not None else ():
            assert codec is not None
            if found.setdefault(leg, codec).params() != codec.params():
                raise ValueError(f"compression settings {params!r} name two codecs for the {leg} leg")
    return found


def _parsed(params: Mapping[str, Any] | str | None) -> tuple[tuple[Leg, ...], Codec | None]:
    options = {"type": params} if isinstance(params, str) else dict(params or {"type": "none"})
    leg = options.pop("leg", "push")
    if not isinstance(leg, str) or leg not in _LEGS:
        raise ValueError(f"leg is {leg!r} in compression settings {params!r}; it is 'push', 'pull' or 'both'")
    return _LEGS[leg], make(options)
