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
count = 1              # equal; each has its part of the bytes and of the work
bandwidth = 1.25e9     # bytes per second of each, each way; left out: no limit
latency_s = 0.0005     # of a message
merge_s = 0.002        # to add one push of the whole model
update_s = 0.005       # to run the optimizer on the whole model

[model]
bytes = 4e6            # of one push of all keys; a pull is as large
"""

from __future__ import annotations

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
        speeds = [machine.speed for machine in self.workers]
        bandwidths = [self.bandwidth, *(machine.bandwidth for machine in self.workers)]
        amounts = (self.jitter, self.spike_probability, self.latency_s, self.merge_s, self.update_s, self.model_bytes)
        if not speeds:
            raise ConfigError("a cluster needs workers")
        if not all(0 < speed.seconds(1) < math.inf and min(speed.fixed_s, speed.per_sample_s) >= 0 for speed in speeds):
            raise ConfigError("every worker needs a time per step above 0, of which no part is negative")
        if self.servers < 1 or not all(one > 0 for one in bandwidths):
            raise ConfigError("a cluster needs at least one server, and bandwidths above 0")
        if not all(0 <= one < math.inf for one in amounts):
            raise ConfigError("times, sizes and noise of a cluster cannot be negative or without end")
        if self.spike_probability > 1 or not 0 < self.spike_factor < math.inf:
            raise ConfigError("spikes need a probability of at most 1, and a factor above 0")


#: Workers of a cluster file, and of a plan.
MOST_WORKERS = 1_000_000

_WORKER = {"count", "batch_s", "batch", "fixed", "bandwidth"}
_SECTIONS = {
    "noise": {"jitter", "spike_probability", "spike_factor"},
    "servers": {"count", "bandwidth", "latency_s", "merge_s", "update_s"},
    "model": {"bytes"},
}
#: Names that are others in :class:`SimulatedCluster`.
_FIELDS = {"count": "servers", "bytes": "model_bytes"}


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
    classes = tables.get("workers", [])
    if not isinstance(classes, list):
        raise ConfigError(f"cluster file {path}: workers are tables [[workers]], with two brackets each")
    found = [_numbers(path, "[workers]", one, _WORKER) for one in classes]
    fields: dict[str, Any] = {}
    for section, names in _SECTIONS.items():
        numbers = _numbers(path, section, tables.get(section, {}), names)
        fields |= {_FIELDS.get(name, name): value for name, value in numbers.items()}
    if sum(max(0, one.get("count", 1)) for one in found) > MOST_WORKERS:
        raise ConfigError(f"cluster file {path}: it has more than {MOST_WORKERS:,} workers")
    return SimulatedCluster(tuple(machine for one in found for machine in _machines(path, one)), **fields)


def _machines(path: str | os.PathLike[str], table: Mapping[str, Any]) -> list[SimulatedWorker]:
    batch, fixed, count = table.get("batch", 32), table.get("fixed", 0.0), table.get("count", 1)
    if "batch_s" not in table or batch < 1 or count < 1:
        raise ConfigError(f"cluster file {path}: [[workers]] needs batch_s, and batch and count are at least 1")
    if not 0 <= fixed < 1:
        raise ConfigError(f"cluster file {path}: fixed is {fixed:g}; it is a part of batch_s, from 0 to less than 1")
    seconds = float(table["batch_s"])
    speed = Speed(fixed * seconds, (1 - fixed) * seconds / batch)
    return [SimulatedWorker(speed, float(table.get("bandwidth", math.inf)))] * count


def _numbers(path: str | os.PathLike[str], name: str, table: object, known: set[str]) -> dict[str, Any]:
    """Return the numbers of a table: only known ones, and whole ones where something is counted."""
    if not isinstance(table, dict):
        raise ConfigError(f"cluster file {path}: {name} is no table of numbers; begin it with [{name}]")
    _check_names(path, table, known, f"key of [{name}]")
    for key, value in table.items():
        wanted, kinds = ("an integer", int) if key in ("count", "batch") else ("a number", int | float)
        if isinstance(value, bool) or not isinstance(value, kinds) or math.isnan(value):
            raise ConfigError(f"cluster file {path}: {key} of [{name}] is {value!r}; it must be {wanted}")
    return table


def _check_names(path: str | os.PathLike[str], table: Mapping[str, Any], known: set[str], what: str) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"cluster file {path}: unknown {what} {name!r}{suggestion(name, known)}")
