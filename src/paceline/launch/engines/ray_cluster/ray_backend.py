"""The backend that runs a job in the actors of a Ray cluster."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass, replace

from paceline.errors import LaunchError
from paceline.launch.engines.ray_cluster.bundles import Bundle, PlacementRequest, RayOptions, bundles
from paceline.launch.host_list import Host
from paceline.launch.job_spec import JobSpec
from paceline.launch.options import typed_options
from paceline.launch.planner import Machine, make_plan
from paceline.launch.remote import RemoteJob, RemoteRequest, remote_request
from paceline.launch.remote.agent_link import AgentLink
from paceline.launch.remote.broker import Broker, shell_command
from paceline.launch.render import describe

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

    def plan(self, spec: JobSpec, machine: Machine) -> RayRequest:
        """Make a bundle per process.

        Raises:
            ValueError: an option or an amount cannot be; see also :func:`~paceline.launch.make_plan`.
        """
        options = typed_options("ray", RayOptions, spec.options)
        plan = make_plan(spec, replace(machine, cores={}), alone=True)
        plan = replace(plan, hosts=tuple(Host(process.host) for process in plan))
        indices = {host.name: str(index) for index, host in enumerate(plan.hosts)}

        def reach(host: Host, script: list[str]) -> list[str]:
            return shell_command(machine.python, json.dumps([int(indices[host.name]), script]))

        return RayRequest(remote_request(plan, machine, options.python, reach), bundles(spec, plan, options), options)

    def render(self, request: RayRequest) -> str:
        """Return the bundles, the commands of the remote shells, and the processes."""
        where = request.options.address or "the cluster of this machine"
        lines = [f"placement group on {where}: {request.options.strategy}"]
        lines += [f"  {bundle.host}: {bundle}" for bundle in request.bundles]
        return "\n".join(lines) + "\n\n" + describe(request.remote.plan, environ=request.remote.environ)

    def check(self, request: RayRequest) -> None:
        """Look for ray.

        Raises:
            LaunchError: it is not installed.
        """
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(f"launcher ray needs the package ray in {sys.executable}: pip install 'paceline[ray]'")

    def submit(self, request: RayRequest) -> RayJob:
        """Reserve the bundles.

        Raises:
            LaunchError: there is no cluster, or it has no room.
        """
        self.check(request)
        return RayJob(request)


class RayJob(RemoteJob):
    """A job on Ray; its bundles are reserved until :meth:`wait` returns.

    Raises:
        LaunchError: there is no cluster, or it has no room.
    """

    def __init__(self, request: RayRequest) -> None:
        self._driver = Broker("ray", "paceline.launch.engines.ray_cluster.driver")
        super().__init__(replace(request.remote, command=self._driver.located(request.remote.command)), explain)
        try:
            self._start_driver(request)
        except BaseException:
            self.cancel()
            raise

    def wait(self) -> int:
        """Run the job and return its exit code. Then its bundles are free.

        Raises:
            LaunchError: an actor could not be started, with Ray's message.
        """
        try:
            return super().wait()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the driver, and so all actors of the job. Idempotent."""
        self._driver.close()

    def _start_driver(self, request: RayRequest) -> None:
        asked = PlacementRequest(
            job=f"paceline-{self.id}",
            address=request.options.address,
            socket=self._driver.socket,
            strategy=request.options.strategy,
            wait_s=request.options.wait,
            resources=[dict(bundle.resources) for bundle in request.bundles],
            labels=[dict(bundle.labels) for bundle in request.bundles],
        )
        self._driver.start(asked.text, {"RAY_USAGE_STATS_ENABLED": "0"})
        timeout_s = _CONNECT_S + request.options.wait
        if self._driver.says(timeout_s) != "ready":
            raise LaunchError(f"the Ray driver did not answer within {timeout_s:g} s")


def explain(host: Host, link: AgentLink) -> str:
    """Return why the agent of a process ended: Ray's message, if it was Ray."""
    text = "\n".join(link.errors)
    if "Ray: " in text:
        return f"the actor of {host.name} ended. Ray says: {text.partition('Ray: ')[2]}"
    return f"the agent of {host.name} ended (exit code {link.code}): {text or link.noise or 'no word'}"
