"""The bundles that a job asks Ray for: one per process. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from paceline.launch.job_spec import JobSpec
from paceline.launch.plan import JobPlan, ProcessSpec
from paceline.launch.worker_groups import WorkerGroup, amount

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
#: A label selector whose name starts so asks for a custom resource of Ray's instead.
_RESOURCE = "resource/"
#: Ray gives every node a resource of its address; a bundle that takes a little of it lands there.
_NODE_SHARE = 0.001
_SCHEDULER_CPUS = 0.1


@dataclass(frozen=True)
class Bundle:
    """The needs of one process on its node."""

    host: str
    """The plan's name of the node."""
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the node has, with the values that Ray's label selectors take (``a``, ``!a``, ``in(a,b)``)."""

    def __str__(self) -> str:
        amounts = [f"{name}={value:g}" for name, value in self.resources.items()]
        return " ".join([*amounts, *(f"{name}={value}" for name, value in self.labels.items())])


@dataclass(frozen=True)
class RayOptions:
    """Options of the backend ``ray``.

    Raises:
        ValueError: an option is impossible; the message says how to correct it.
    """

    address: str = ""
    """The cluster's address; empty: ``RAY_ADDRESS``, or the cluster that runs on this machine."""
    strategy: str = "PACK"
    """How bundles spread over nodes: one of Ray's placement strategies."""
    server_cpus: float = 1.0
    """CPUs of a server's bundle."""
    python: str = ""
    """Interpreter of the processes on the nodes; empty: the launcher's if a node has it, else ``python3``."""
    wait: float = 60.0
    """How long the cluster may take to find room for all bundles, in seconds."""

    def __post_init__(self) -> None:
        if self.strategy not in _STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} is not one of {', '.join(_STRATEGIES)}")
        if self.address.startswith("ray://"):
            raise ValueError(
                f"address={self.address!r} is that of a Ray client; the launcher is a driver and runs on a node of the "
                "cluster: ray job submit -- paceline launch --launcher ray …"
            )
        if not self.server_cpus >= 0 or not self.wait > 0:
            raise ValueError("server-cpus is 0 or more, and wait above 0 seconds")


def bundles(spec: JobSpec, plan: JobPlan, options: RayOptions) -> tuple[Bundle, ...]:
    """Return a bundle per process of the plan, in its order.

    Raises:
        ValueError: an amount is not one.
    """
    groups = {group.name: group for group in spec.worker_groups}
    so_far: Counter[str] = Counter()
    found = []
    for process in plan:
        found.append(_bundle(process, groups.get(process.group), so_far[process.group], options))
        so_far[process.group] += 1
    return tuple(found)


def _bundle(process: ProcessSpec, group: WorkerGroup | None, index: int, options: RayOptions) -> Bundle:
    if process.role == "scheduler":
        return Bundle(process.host, {"CPU": _SCHEDULER_CPUS})
    if group is None:
        return Bundle(process.host, {"CPU": options.server_cpus})
    resources = {"CPU": amount("cpus", group.resources.get("cpus", "1"))}
    if "gpus" in group.resources:
        resources["GPU"] = amount("gpus", group.resources["gpus"])
    if "memory" in group.resources:
        resources["memory"] = amount("memory", group.resources["memory"])
    labels = {}
    for name, value in group.select.items():
        if name.startswith(_RESOURCE):
            resources[name.removeprefix(_RESOURCE)] = amount(name, value)
        else:
            labels[name] = value
    if group.hosts:
        resources[f"node:{group.hosts[index % len(group.hosts)].name}"] = _NODE_SHARE
    return Bundle(process.host, resources, labels)


@dataclass(frozen=True)
class PlacementRequest:
    """A placement group, and where to serve the remote shells."""

    job: str
    address: str
    """The cluster's address; empty: the one of this machine."""
    socket: str
    """Path of the unix socket."""
    strategy: str
    wait_s: float
    """How long the cluster may take to find room."""
    resources: list[dict[str, float]]
    labels: list[dict[str, str]]

    @property
    def text(self) -> str:
        """The request as a line."""
        return json.dumps(asdict(self))
