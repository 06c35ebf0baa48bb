"""Worker groups: workers of one job that differ in hosts, resources, environment or options."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.config import MOST_SPEED
from paceline.launch.host_list import Host, parse_host_list
from paceline.naming import nearest, suggestion

N = TypeVar("N", int, float)

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_KEYS = {
    "n": "n", "count": "n", "hosts": "hosts", "select": "select", "slots": "slots", "env": "env", "args": "args",
    "weight": "weight", "iface": "interface", "interface": "interface", "cpus": "cpus", "gpus": "gpus",
    "memory": "memory",
}  # fmt: skip
_ANY = re.compile(r",\s*([A-Za-z]+)\s*=")
_NEXT = re.compile(rf",\s*(?=(?:{'|'.join(_KEYS)})\s*=)")
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")
_RESOURCES = ("cpus", "gpus", "memory")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(k|[MGT]|[KMGT]i)?")
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class WorkerGroup:
    """Workers that are alike. Ranks count group by group, in the order of the job's groups.

    Raises:
        ValueError: a field cannot be; the message names the group.
    """

    name: str
    """Lower-case letters, digits and hyphens: engines use it in names of their own."""
    count: int
    """How many workers."""
    hosts: tuple[Host, ...] = ()
    """Where they run; empty: the job's hosts whose ``group`` is this one or empty."""
    select: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes to run on, where an engine chooses them: Kubernetes' and Ray's labels; Slurm's ``partition``,
    ``constraint``; Grid Engine's ``queue``."""
    slots: int | None = None
    """How many of them one host may run; stronger than the host's own number."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of these workers, stronger than the job's."""
    args: tuple[str, ...] = ()
    """Words that follow the job's command."""
    weight: float | None = None
    """Speed of one of these workers relative to others; None: its host's."""
    interface: str = ""
    """Network interface by name, address or CIDR; stronger than the host's own."""
    resources: Mapping[str, str] = field(default_factory=dict)
    """Resources of one worker, for engines that allocate: ``cpus``, ``gpus``, ``memory`` (``8Gi``)."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"group {self.name!r}: a name is of lower-case letters, digits and inner hyphens")
        if self.count < 1:
            raise ValueError(f"group {self.name}: n={self.count}; a group has at least 1 worker")
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"group {self.name}: slots={self.slots}; it is at least 1")
        if self.weight is not None and not 0 < self.weight <= MOST_SPEED:
            raise ValueError(f"group {self.name}: weight={self.weight:g}; it is above 0, and at most {MOST_SPEED:g}")


def parse_group(text: str) -> WorkerGroup:
    """Read ``NAME: n=2, hosts=h1,h2, env=A=1, env=B=two, slots=1, select=zone=a, args=--batch-size 32, weight=2``.

    A comma that a key does not follow belongs to the value. Quotes around a value keep anything. ``env``, ``select``
    and ``args`` may be repeated.

    Raises:
        ValueError: the text is wrong; the message says how to correct it.
    """
    name, colon, rest = text.partition(":")
    if not colon:
        raise ValueError(f'--group {text!r} has no name; write "NAME: n=2, hosts=h1,h2"')
    table: dict[str, Any] = {}
    for part in _split(rest):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or key not in _KEYS:
            raise ValueError(f"group {name.strip()}: {part.strip()!r} is not one of {', '.join(_KEYS)} with a value")
        _refuse_misspelt(name.strip(), part)
        try:
            _add(table, _KEYS[key], _unquoted(value.strip()))
        except ValueError as error:
            raise ValueError(f"group {name.strip()}: {key}: {error}") from None
    return group_from_table(name.strip(), table)


def _refuse_misspelt(name: str, part: str) -> None:
    """Refuse a word that stands where a key would, and is nearly one."""
    for word in _ANY.findall(re.sub(_QUOTED, "", part)):
        meant = nearest(word, _KEYS)
        if meant:
            raise ValueError(f"group {name}: unknown {word!r}; did you mean {meant!r}? If not, put its value in quotes")


def group_from_table(name: str, table: Mapping[str, Any]) -> WorkerGroup:
    """Return the group that a table of a job file, or a command line, describes."""
    if not isinstance(table, Mapping):
        raise ValueError(f"group {name}: {table!r} is not a table, as in: n = 2")
    unknown = sorted(set(table) - set(_KEYS))
    if unknown:
        raise ValueError(f"group {name}: unknown {unknown[0]!r}{suggestion(unknown[0], _KEYS)}")
    values = {_KEYS[key]: value for key, value in table.items()}
    if "n" not in values:
        raise ValueError(f"group {name}: the number of workers is missing, as in: n=2")
    try:
        return WorkerGroup(
            name,
            _number("n", values["n"], int),
            hosts=_hosts(values.get("hosts", "")),
            select=_mapping(values.get("select", {})),
            slots=_number("slots", values["slots"], int) if "slots" in values else None,
            env=_mapping(values.get("env", {})),
            args=_words(values.get("args", ())),
            weight=_number("weight", values["weight"], float) if "weight" in values else None,
            interface=str(values.get("interface", "")),
            resources={key: str(values[key]) for key in _RESOURCES if key in values},
        )
    except (TypeError, ValueError) as error:
        text = str(error)
        raise ValueError(text if text.startswith("group ") else f"group {name}: {text}") from None


def amount(name: str, text: str, plain: float | None = 1) -> float:
    """Return an amount of a resource, as in ``2``, ``0.5``, ``500M`` or ``8Gi``.

    A number without a unit counts ``plain``; None: it needs one.

    Raises:
        ValueError: it is none.
    """
    match = _AMOUNT.fullmatch(text)
    unit = None if match is None else _UNITS[match[2]] if match[2] else plain
    found = math.inf if match is None or unit is None else float(match[1]) * unit
    if found == math.inf:
        example = "500M" if plain is None else "2, 0.5"
        raise ValueError(f"{name}={text[:100]!r} is not an amount such as {example} or 8Gi")
    return found


def whole(name: str, text: str) -> int:
    """Return an amount of a resource that an engine gives as a whole only.

    Raises:
        ValueError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text!r}: this launcher takes integers only, 1 or more")
    return int(text)


def _split(text: str) -> list[str]:
    """Split at commas before a key, outside of quotes."""
    hidden: list[str] = []

    def hide(match: re.Match[str]) -> str:
        hidden.append(match.group())
        return f"\0{len(hidden) - 1}\0"

    masked = re.sub(_QUOTED, hide, text)
    return [re.sub("\0(\\d+)\0", lambda m: hidden[int(m[1])], part) for part in _NEXT.split(masked) if part.strip()]


def _unquoted(value: str) -> str:
    """Remove quotes around the whole value, or around the value of a ``NAME=VALUE``."""
    if len(value) > 1 and value[0] == value[-1] == "'":
        return value[1:-1]
    if len(value) > 1 and value[0] == value[-1] == '"':
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    head, equals, tail = value.partition("=")
    quoted = equals and len(tail) > 1 and tail[0] == tail[-1] and tail[0] in "'\"" and re.fullmatch(r"\w+", head)
    return f"{head}={_unquoted(tail)}" if quoted else value


def _add(table: dict[str, Any], key: str, value: str) -> None:
    if key in ("env", "select"):
        table.setdefault(key, {}).update(_mapping([value]))
    elif key == "args":
        table[key] = (*table.get(key, ()), *shlex.split(value))
    elif key in table:
        raise ValueError("it is given twice")
    else:
        table[key] = value


def _number(key: str, value: Any, kind: type[N]) -> N:
    """Return a number, given as one in a job file, or as text."""
    try:
        number = kind(value)
        if isinstance(value, str) or (number == value and not isinstance(value, bool)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{key}={value} is not {'an integer' if kind is int else 'a number'}")


def _hosts(value: object) -> tuple[Host, ...]:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return parse_host_list(text) if text else ()


def _words(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(shlex.split(value))
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    raise ValueError(f"args={value!r} is neither text nor a list")


def _mapping(value: object) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {str(key): str(one) for key, one in value.items()}
    if not isinstance(value, str | list):
        raise ValueError(f"{value!r} is not a table of NAME = VALUE")
    result = {}
    for pair in [value] if isinstance(value, str) else value:
        name, equals, text = str(pair).partition("=")
        if not name or not equals:
            raise ValueError(f"{pair!r} is not NAME=VALUE")
        result[name.strip()] = text
    return result
