"""Options of one backend: ``-o NAME=VALUE``."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.naming import suggestion


def backend_options(backend: str, known: Mapping[str, str], given: Mapping[str, str]) -> Mapping[str, str]:
    """Check the options of a backend and return them.

    Args:
        backend: its name, for messages.
        known: what each option means.
        given: by the user.

    Raises:
        ValueError: one is unknown; the message lists what there is.
    """
    for name in given:
        if name not in known:
            there = "; ".join(f"{one}: {text}" for one, text in known.items()) or "none"
            raise ValueError(f"launcher {backend!r} has no option {name!r}{suggestion(name, known)}; it has: {there}")
    return given
