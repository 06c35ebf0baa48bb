"""The Ray driver of a job: reserves the bundles, and runs commands in them for remote shells.

A process of its own, because Ray starts threads and the launcher forks. It ends with its stdin, and Ray then ends all
actors of the job; a command in an actor loses its stdin and ends too.

| it reads | it writes |
|---|---|
| one line of JSON on stdin: a ``PlacementRequest`` | ``ready`` on stdout when the bundles are reserved |
| connections to the unix socket, see :mod:`~paceline.launch.remote.shell` | frames on them |

Errors before ``ready`` are one text on stderr, and exit code 1.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.launch.engines.ray_cluster.actor import Shell
from paceline.launch.engines.ray_cluster.ray_backend import PlacementRequest
from paceline.launch.remote.shell import READ_BYTES, accept_all, failure, pack, read_request

_REACH_S = 10.0

#: Ray sends a token to no cluster whose address is given, unless it is told to.
_TOKEN = (
    "; if the cluster asks for a token (with Ray 2.60 ray start does so where ~/.ray/auth_token exists), set "
    "RAY_AUTH_MODE=token, and have the token in that file or in RAY_AUTH_TOKEN"
)


def main() -> int:
    """Run until stdin ends."""
    request = PlacementRequest.of(sys.stdin.readline())
    advice = ""
    try:
        _reach(request.options.address)
        if "RAY_AUTH_MODE" not in os.environ:
            advice = _TOKEN
        ray.init(request.options.address or "auto", namespace=request.job, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:
        print(f"no Ray cluster: {error}{advice}", file=sys.stderr)
        return 1
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(request.socket)
        listener.listen(1024)
        try:
            group = _reserve(request)
        except (RayError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
        accept_all(listener, lambda connection: _serve(connection, group, request))
        print("ready", flush=True)
        sys.stdin.read()
    ray.shutdown()
    return 0


def _reach(address: str) -> None:
    """Look whether somebody listens at an address: Ray itself tries for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), _REACH_S).close()
        except OSError as error:
            raise OSError(f"nothing listens at {address} ({error.strerror or error})") from error


def _reserve(request: PlacementRequest) -> PlacementGroup:
    """Return the placement group when all its bundles are reserved."""
    labels = [dict(bundle.labels) for bundle in request.bundles]
    group = placement_group(
        [dict(bundle.resources) for bundle in request.bundles],
        strategy=request.options.strategy,
        name=request.job,
        bundle_label_selector=labels if any(labels) else None,
    )
    try:
        ray.get(group.ready(), timeout=request.options.wait)
    except GetTimeoutError:
        raise ValueError(_no_room(request)) from None
    return group


def _no_room(request: PlacementRequest) -> str:
    there = [
        f"  {node['NodeManagerAddress']}: "
        + ", ".join(f"{name}={amount:g}" for name, amount in sorted(node["Resources"].items()) if ":" not in name)
        for node in ray.nodes()
        if node["Alive"]
    ]
    free = ", ".join(
        f"{name}={amount:g}" for name, amount in sorted(ray.available_resources().items()) if ":" not in name
    )
    return "\n".join(
        [
            f"the Ray cluster has had no room for the job for {request.options.wait:g} s ({request.options.strategy}).",
            f"asked for: {'; '.join(map(str, request.bundles))}",
            f"free now: {free or 'nothing'}; nodes:",
            *there,
            "ask for less (cpus=, gpus=, select=, -o server-cpus=), or wait longer: -o wait=SECONDS",
        ]
    )


def _serve(connection: socket.socket, group: PlacementGroup, request: PlacementRequest) -> None:
    actor = None
    with connection, contextlib.suppress(OSError):  # the remote shell is gone; the actor goes too
        try:
            bundle, argv = read_request(connection)
            actor = _start(group, bundle, request.bundles[bundle].resources, argv)
            threading.Thread(target=_pass_input, args=[connection, actor], daemon=True).start()
            for reference in actor.output.remote():
                kind, data = ray.get(reference)
                connection.sendall(pack(kind, data))
        except RayError as error:
            connection.sendall(failure(f"Ray: {error}"))
    if actor is not None:
        ray.kill(actor)


def _start(group: PlacementGroup, bundle: int, resources: Mapping[str, float], argv: list[str]) -> Any:
    shell: Any = Shell  # ray.remote has made it more than a class
    own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
    return shell.options(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        memory=resources.get("memory"),
        resources=own,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
    ).remote(argv)


def _pass_input(connection: socket.socket, actor: Any) -> None:
    with contextlib.suppress(OSError, RayError):  # the other thread reports how the actor ended
        while data := connection.recv(READ_BYTES):
            ray.get(actor.write.remote(data))
        actor.write.remote(b"")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may wait for Ray
