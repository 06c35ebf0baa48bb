"""A simulated cluster, and its file::

[[workers]]            # one table per class
count = 4
batch_s = 1.0          # time of a step of `batch` samples
batch = 32
fixed = 0.2            # part of that time that does not depend on the samples
bandwidth = 1.25e8     # bytes per second of its own link, each way; left out: no limit

[noise]
jitter = 0.1           # sigma of the log-normal noise of every step
spike_probability = 0.05
spike_factor = 8.0

[servers]
count = 1              # alike; each has its part of the bytes and of the work
bandwidth = 1.25e9     # bytes per second of each, each way; left out: no limit
latency_s = 0.0005     # of a message
merge_s = 0.002        # to add one push of the whole model
update_s = 0.005       # to run the optimizer on the whole model

[model]
bytes = 4e6            # of one push of all keys; a pull is as large
"""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.hetero import Speed
from paceline.naming import suggestion


@dataclass(frozen=True)
class SimulatedWorker:
    """A worker."""

    speed: Speed
    bandwidth: float = math.inf
    """Bytes per second, each way."""


@dataclass(frozen=True)
class SimulatedCluster:
    """Workers, noise, servers and the size of the model."""

    workers: tuple[SimulatedWorker, ...]
    jitter: float = 0.0
    """Sigma of the log-normal noise of each step."""
    spike_probability: float = 0.0
    spike_factor: float = 1.0
    servers: int = 1
    bandwidth: float = math.inf
    """Bytes per second of each server, each way."""
    latency_s: float = 0.0
    merge_s: float = 0.0
    """Server time to add one push of the whole model."""
    update_s: float = 0.0
    """Server time to run the optimizer on the whole model."""
    model_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError("a cluster needs workers")
        if min(machine.speed.seconds(1) for machine in self.workers) <= 0:
            raise ConfigError("every worker needs a time per step above 0")
        if self.servers < 1 or self.bandwidth <= 0 or min(machine.bandwidth for machine in self.workers) <= 0:
            raise ConfigError("a cluster needs at least one server, and bandwidths above 0")
        if min(self.jitter, self.latency_s, self.merge_s, self.update_s, self.model_bytes, self.spike_factor) < 0:
            raise ConfigError("times, sizes and noise of a cluster cannot be negative")


_WORKER = {"count", "batch_s", "batch", "fixed", "bandwidth"}
_SECTIONS = {
    "noise": {"jitter": "jitter", "spike_probability": "spike_probability", "spike_factor": "spike_factor"},
    "servers": {
        "count": "servers",
        "bandwidth": "bandwidth",
        "latency_s": "latency_s",
        "merge_s": "merge_s",
        "update_s": "update_s",
    },
    "model": {"bytes": "model_bytes"},
}


def read_cluster(path: str | os.PathLike[str]) -> SimulatedCluster:
    """Read a cluster file.

    Raises:
        ConfigError: the file cannot be read, or says something that is not understood.
    """
    try:
        tables = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cluster file {path} cannot be read: {why}") from error
    _check_names(path, tables, {"workers", *_SECTIONS}, "table")
    machines = [machine for one in tables.get("workers", []) for machine in _machines(path, one)]
    fields: dict[str, Any] = {}
    for section, names in _SECTIONS.items():
        _check_names(path, tables.get(section, {}), set(names), f"key of [{section}]")
        fields |= {names[name]: value for name, value in tables.get(section, {}).items()}
    wrong = [name for name, value in fields.items() if not isinstance(value, int | float)]
    if wrong:
        raise ConfigError(f"cluster file {path}: {wrong[0]} is {fields[wrong[0]]!r}; it must be a number")
    return SimulatedCluster(tuple(machines), **fields)


def _machines(path: str | os.PathLike[str], table: Mapping[str, Any]) -> list[SimulatedWorker]:
    _check_names(path, table, _WORKER, "key of [[workers]]")
    try:
        seconds, batch = float(table["batch_s"]), int(table.get("batch", 32))
        fixed = float(table.get("fixed", 0.0))
        speed = Speed(fixed * seconds, (1 - fixed) * seconds / batch)
        machine = SimulatedWorker(speed, float(table.get("bandwidth", math.inf)))
        return [dataclasses.replace(machine) for _ in range(int(table.get("count", 1)))]
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"cluster file {path}: [[workers]] needs batch_s, a number of seconds ({error!r})") from error


def _check_names(path: str | os.PathLike[str], table: Mapping[str, Any], known: set[str], what: str) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"cluster file {path}: unknown {what} {name!r}{suggestion(name, known)}")
