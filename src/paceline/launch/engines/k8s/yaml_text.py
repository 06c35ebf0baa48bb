"""YAML as Kubernetes reads it, of dictionaries, lists and scalars. Strings that YAML could take for more are quoted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

#: Words that every reader of YAML takes for a string: no number, no yes or no, no null.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
#: A character of two surrogates, and the control character that JSON leaves as it is.
_BEYOND_JSON = re.compile(r"\\ud[89ab]..\\ud[c-f]..|\x7f")
_NOT_STRINGS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def documents(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return a stream of documents, each of one object."""
    return "---\n".join("\n".join(_lines(one)) + "\n" for one in objects)


def _lines(value: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for key, inner in value.items():
        head = f"{_scalar(key)}:"
        if isinstance(inner, Mapping) and inner:
            lines += [head, *(f"  {line}" for line in _lines(inner))]
        elif isinstance(inner, list | tuple) and inner:
            lines += [head, *_items(inner)]
        else:
            lines.append(f"{head} {_scalar(inner)}")
    return lines


def _items(values: Iterable[Any]) -> list[str]:
    lines: list[str] = []
    for value in values:
        if isinstance(value, Mapping) and value:
            first, *rest = _lines(value)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        else:
            lines.append(f"- {_scalar(value)}")
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_STRINGS:
        return value
    return _BEYOND_JSON.sub(_escaped, json.dumps(value))  # JSON is YAML too, but for these


def _escaped(match: re.Match[str]) -> str:
    """Return a character as YAML escapes it."""
    text = match.group()
    return f"\\U{ord(json.loads(chr(34) + text + chr(34))):08x}"
