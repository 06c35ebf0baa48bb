"""A job spec as text, for a launcher that goes on elsewhere: inside an allocation."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from paceline.launch.groups import WorkerGroup
from paceline.launch.hosts import Host
from paceline.launch.spec import Graces, JobSpec


def to_json(spec: JobSpec) -> str:
    """Return a spec as JSON. It holds the user's variables: it must not be shown."""
    return json.dumps(asdict(spec))


def from_json(text: str) -> JobSpec:
    """Return the spec of :func:`to_json`.

    Raises:
        ValueError: it is none.
    """
    try:
        values: dict[str, Any] = json.loads(text)
        values["command"] = tuple(values["command"])
        values["hosts"] = _hosts(values["hosts"])
        values["groups"] = tuple(
            WorkerGroup(**(one | {"hosts": _hosts(one["hosts"]), "args": tuple(one["args"])}))
            for one in values["groups"]
        )
        values["graces"] = Graces(**values["graces"])
        return JobSpec(**values)
    except (TypeError, KeyError) as error:
        raise ValueError(f"this is not a job of this version of paceline: {error}") from error


def _hosts(given: list[dict[str, Any]]) -> tuple[Host, ...]:
    return tuple(Host(**one) for one in given)
