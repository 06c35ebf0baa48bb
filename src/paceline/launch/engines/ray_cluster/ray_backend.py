"""The backend that runs a job in the actors of a Ray cluster."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from paceline.errors import LaunchError
from paceline.launch.backends import typed_options
from paceline.launch.host_list import Host
from paceline.launch.job_spec import JobSpec
from paceline.launch.plan import JobPlan, ProcessSpec, describe
from paceline.launch.planner import Machine, make_plan
from paceline.launch.remote import BrokeredJob, RemoteRequest, remote_request
from paceline.launch.remote.agent_link import AgentLink
from paceline.launch.remote.shell import Broker, shell_command
from paceline.launch.worker_groups import WorkerGroup, amount

#: How long ``ray.init`` may take, on top of the wait for room.
_CONNECT_S = 60.0


@dataclass(frozen=True)
class RayRequest:
    """A job on Ray."""

    remote: RemoteRequest
    bundles: tuple[Bundle, ...]
    options: RayOptions


class RayBackend:
    """Reserves a bundle per process and starts an agent in an actor of each."""

    reads = frozenset({"hosts", "select", "cpus", "gpus", "memory"})

    def plan(self, spec: JobSpec, machine: Machine) -> RayRequest:
        """Make a bundle per process."""
        options = typed_options("ray", RayOptions, spec.options)
        plan = make_plan(spec, machine, alone=True)
        indices = {host.name: str(index) for index, host in enumerate(plan.hosts)}

        def reach(host: Host, script: list[str]) -> list[str]:
            return shell_command(machine.python, json.dumps([int(indices[host.name]), script]))

        request = replace(remote_request(plan, machine, options.python, reach), explain=explain)
        return RayRequest(request, bundles(spec, plan, options), options)

    def render(self, request: RayRequest) -> str:
        """Return the bundles, the commands of the remote shells, and the processes."""
        where = request.options.address or "the cluster of this machine"
        lines = [f"placement group on {where}: {request.options.strategy}"]
        lines += [f"  {bundle.host}: {bundle}" for bundle in request.bundles]
        return "\n".join(lines) + "\n\n" + describe(request.remote.plan, environ=request.remote.environ)

    def check(self, request: RayRequest) -> None:
        """Look for ray."""
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(f"launcher ray needs the package ray in {sys.executable}: pip install 'paceline[ray]'")

    def submit(self, request: RayRequest) -> RayJob:
        """Reserve the bundles."""
        return RayJob(request)


class RayJob(BrokeredJob):
    """A job on Ray; its bundles are reserved until :meth:`wait` returns."""

    def __init__(self, request: RayRequest) -> None:
        super().__init__(request.remote, Broker("ray", "paceline.launch.engines.ray_cluster.driver"))
        try:
            self._start_driver(request)
        except BaseException:
            self.cancel()
            raise

    def _start_driver(self, request: RayRequest) -> None:
        asked = PlacementRequest(f"paceline-{self.id}", self._broker.socket, request.options, request.bundles)
        self._broker.start(asked.text, {"RAY_USAGE_STATS_ENABLED": "0"})
        timeout_s = _CONNECT_S + request.options.wait
        if self._broker.says(timeout_s) != "ready":
            raise LaunchError(f"the Ray driver did not answer within {timeout_s:g} s")


def explain(host: Host, link: AgentLink) -> str:
    """Return why the agent of a process ended: Ray's message, if it was Ray."""
    text = "\n".join(link.errors)
    if "Ray: " in text:
        return f"the actor of {host.name} ended. Ray says: {text.partition('Ray: ')[2]}"
    return f"the agent of {host.name} ended (exit code {link.code}): {text or link.noise or 'no word'}"


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
    """Options of the backend ``ray``."""

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
    """A placement group, and the path of the unix socket that serves the remote shells."""

    job: str
    socket: str
    options: RayOptions
    bundles: tuple[Bundle, ...]

    @property
    def text(self) -> str:
        """The request as a line."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> PlacementRequest:
        """Return the request of a line."""
        values = json.loads(text)
        options, bundles = RayOptions(**values["options"]), tuple(Bundle(**one) for one in values["bundles"])
        return cls(values["job"], values["socket"], options, bundles)
