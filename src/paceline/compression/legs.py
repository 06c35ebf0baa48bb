"""The legs that a codec works on: pushes, pulls, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from paceline.compression.base import Codec
from paceline.compression.codec_registry import make

Leg: TypeAlias = Literal["push", "pull"]
#: Settings of one codec, or of one for each leg.
Compression: TypeAlias = Mapping[str, Any] | str | Sequence[Mapping[str, Any] | str]

_LEGS: dict[str, tuple[Leg, ...]] = {"push": ("push",), "pull": ("pull",), "both": ("push", "pull")}


def by_leg(params: Compression | None) -> dict[Leg, Codec]:
    """Return the codec of each leg that compression settings name.

    Args:
        params: settings as :func:`paceline.compression.make` takes them, with ``leg`` besides (``push``, the
            default, ``pull`` or ``both``); or a list of such settings, for a codec of its own on each leg.

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
