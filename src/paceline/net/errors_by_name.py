"""Errors between processes: the name of a class, and a text."""

from __future__ import annotations

from paceline import errors
from paceline.errors import PacelineError, RemoteError
from paceline.wire import messages as m

#: Length at which texts are cut.
_MAX_TEXT = 4000

_BUILTIN: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError}


def failed(error: Exception) -> m.Failed:
    """Return the answer that tells a peer of an error."""
    return m.Failed(type(error).__name__, str(error)[:_MAX_TEXT])


def rebuild(body: m.Failed, whom: str) -> Exception:
    """Return the exception that a peer's failure stands for. Other classes than ours become ``RemoteError``.

    Args:
        body: the peer's answer.
        whom: the peer, which the text will name.
    """
    known = getattr(errors, body.kind, None)
    if isinstance(known, type) and issubclass(known, PacelineError):
        return known(f"{whom}: {body.text}")
    return _BUILTIN.get(body.kind, RemoteError)(f"{whom}: {body.text}")
