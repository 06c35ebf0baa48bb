"""A real Ray cluster on hosts with names, for tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.clusters.hosts import StepwiseStart
from tests.engines.named_hosts import NamedHosts

_PORT = 6399
_START_S = 60.0


class RayNodes(StepwiseStart):
    """A Ray node on every host; the first is the head.

    Each node has a process namespace of its own, so all of it ends with one process, and sees no other's.

    Args:
        hosts: where.
        ray: the program ``ray``.
        folder: for files of the nodes.
        labels: of the nodes, in order.
        cpus: of each node.
        environment: of all Ray's processes.
    """

    def __init__(
        self,
        hosts: NamedHosts,
        ray: Path,
        folder: Path,
        labels: Sequence[Mapping[str, str]],
        cpus: int,
        environment: Mapping[str, str],
    ) -> None:
        self._hosts, self._ray, self._folder, self._labels, self._cpus = hosts, ray, folder, labels, cpus
        self._environment = {**os.environ, **environment, "RAY_USAGE_STATS_ENABLED": "0"}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        """Of the cluster."""
        return f"{self._hosts.address(self._hosts.names[0])}:{_PORT}"

    def _open(self, stack: contextlib.ExitStack) -> None:
        stack.callback(self.close)
        for index, name in enumerate(self._hosts.names):
            self._start(index, name)
            if index == 0:
                self._wait_for_head()

    def close(self) -> None:
        """End all nodes."""
        for name in list(self._nodes):
            self.kill(name)

    def daemon(self, name: str) -> int:
        """Return the process that runs a node; all that runs on the node comes from it."""
        return self._nodes[name].pid

    def kill(self, name: str) -> None:
        """End a node and everything it has started, as a power cut does."""
        node = self._nodes.pop(name)
        node.kill()
        node.wait()

    def _start(self, index: int, name: str) -> None:
        role = (
            ["--head", "--port", str(_PORT), "--include-dashboard=false"] if index == 0 else ["--address", self.address]
        )
        labels = ",".join(f"{key}={value}" for key, value in self._labels[index].items())
        command = [str(self._ray), "start", "--block", *role, "--node-ip-address", self._hosts.address(name)]
        command += ["--num-cpus", str(self._cpus), "--object-store-memory", "80000000", "--disable-usage-stats"]
        command += ["--temp-dir", str(self._folder / name), *(["--labels", labels] if labels else [])]
        own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
        with open(self._folder / f"{name}.log", "wb") as log:
            self._nodes[name] = subprocess.Popen(
                self._hosts.command(name, own), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def _wait_for_head(self) -> None:
        until = time.monotonic() + _START_S
        address, _, port = self.address.partition(":")
        tried = ["bash", "-c", f": >/dev/tcp/{address}/{port}"]
        while subprocess.run(
            self._hosts.command(self._hosts.names[0], tried), capture_output=True, check=False
        ).returncode:
            log = (self._folder / f"{self._hosts.names[0]}.log").read_text()
            assert self._nodes[self._hosts.names[0]].poll() is None, log
            assert time.monotonic() < until, log
            time.sleep(0.2)

    def wait_for(self, count: int) -> None:
        """Wait until so many nodes are alive."""
        code = (
            f"import ray; ray.init({self.address!r}, log_to_driver=False, logging_level='error');"
            f"import time\nwhile sum(node['Alive'] for node in ray.nodes()) < {count}: time.sleep(0.2)"
        )
        python = str(self._ray.with_name("python"))
        self._hosts.run(self._hosts.names[0], [python, "-c", code], self._environment, _START_S)
