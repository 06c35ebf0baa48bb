"""Errors across processes: a class name and a text."""

from __future__ import annotations

from paceline import errors
from paceline.errors import PacelineError, RemoteError
from paceline.wire import messages as m

_BUILTIN: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError}


def failed(error: Exception) -> m.Failed:
    """Describe an error to the peer that caused it."""
    return m.Failed(type(error).__name__, str(error)[:4000])


def rebuild(body: m.Failed, whom: str, default: type[PacelineError] = RemoteError) -> Exception:
    """Return the exception that a peer's failure stands for; unknown names become ``default``."""
    known = getattr(errors, body.kind, None)
    if isinstance(known, type) and issubclass(known, PacelineError):
        return known(f"{whom}: {body.text}")
    return _BUILTIN.get(body.kind, default)(f"{whom}: {body.text}")
