"""The page of a job: one HTML file with all that it needs. It asks no other host for anything. Pure, but for the file.

Without data the page asks its server for events; with data it is a report that opens without a server.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec

from paceline.errors import ConfigError

_NO_DATA, _NO_POLICY = '<script type="application/json" id="data">null</script>', "POLICY"


def policy() -> str:
    """Return the page's Content-Security-Policy: its own script and style, and its own server."""
    text = _text()
    script, style = (_hash(text, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def page(data: Mapping[str, Any] | None = None) -> bytes:
    """Return the page, with the data of a report or without."""
    text = _text().replace(_NO_POLICY, policy(), 1)
    shown = "null" if data is None else embedded(data)
    head, tail = text.split(_NO_DATA)
    return (head + _NO_DATA.replace("null", shown) + tail).encode()


def check_report(path: str) -> None:
    """Check that a report can be written, on the host of the scheduler.

    Raises:
        ConfigError: its folder is missing, or nothing can be written there.
    """
    no_file = os.path.exists(path) and not os.path.isfile(path)  # a new file takes the place of the old one
    folder = os.path.dirname(path) or os.curdir
    if no_file or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"report {path!r} cannot be written: it is no regular file, or {folder!r} is no folder to write to"
        )


def embedded(data: object) -> str:
    """Return data as JSON that no reader of HTML takes for anything else: without ``<``, ``>`` and ``&``."""
    text = msgspec.json.encode(data).decode()
    for one in "<>&\u2028\u2029":
        text = text.replace(one, f"\\u{ord(one):04x}")
    return text


@functools.cache
def _text() -> str:
    return resources.files("paceline.observe").joinpath("page.html").read_text()


def _hash(text: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
