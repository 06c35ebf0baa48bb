"""The backend that runs a job as a service on YARN."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

from paceline.errors import LaunchError
from paceline.host.interfaces import address_of, address_towards
from paceline.launch.backends import typed_options
from paceline.launch.engines.yarn.container import KEY_FILE_VARIABLE, KEY_VARIABLE
from paceline.launch.engines.yarn.service import Service, Services, YarnOptions, make_service, names
from paceline.launch.host_list import Host
from paceline.launch.job_spec import JobSpec
from paceline.launch.plan import JobPart, describe, job_parts
from paceline.launch.planner import Machine, make_plan
from paceline.launch.processes import wait_for
from paceline.launch.remote import BrokeredJob, RemoteRequest, remote_request
from paceline.launch.remote.agent_link import AgentLink
from paceline.launch.remote.shell import Broker, shell_command
from paceline.launch.supervise.guardian import Canceller
from paceline.net.security import new_job_key

_POLL_S = 1.0
_START_S = 20.0
#: How long YARN may take to end the containers of a service that was destroyed.
_DESTROY_S = 60.0
#: States of a service from which it does not come back.
_OVER = frozenset({"STOPPED", "FAILED", "SUCCEEDED"})


@dataclass(frozen=True)
class YarnRequest:
    """A job on YARN."""

    remote: RemoteRequest
    name: str
    """Name of the service."""
    parts: list[JobPart]
    options: YarnOptions

    @property
    def key_file(self) -> str:
        """The file of the hub's key; empty: the key is in the service."""
        folder = self.options.key_folder
        return str(Path(folder, f"{self.name}.key")) if folder else ""

    def service(self, launcher: str, key: str) -> Service:
        """Return the service, whose containers reach the launcher's hub at an address, and have its key."""
        path = self.remote.environ.get("PYTHONPATH", "")
        environ = {"PYTHONPATH": path} if path else {}
        environ |= {KEY_FILE_VARIABLE: self.key_file} if self.key_file else {KEY_VARIABLE: key}
        return make_service(self.name, self.parts, self.options, self.remote.plan.directory, environ, launcher)


class YarnBackend:
    """Asks for a service, and starts an agent in each of its containers."""

    reads = frozenset({"cpus", "gpus", "memory"})

    def plan(self, spec: JobSpec, machine: Machine) -> YarnRequest:
        """Make the service. Reads ``yarn-site.xml`` if the option ``rm`` is not given."""
        options = typed_options("yarn", YarnOptions, spec.options)
        options = replace(
            options,
            rm=options.rm or resource_manager(machine.environ),
            user=options.user or machine.environ.get("HADOOP_USER_NAME", ""),
            python=options.python or machine.python,
        )
        plan = make_plan(spec, machine, alone=True)
        parts = job_parts(spec, plan)
        containers = names(parts)

        def reach(host: Host, script: list[str]) -> list[str]:
            return shell_command(machine.python, json.dumps(containers[host.name]))

        remote = remote_request(plan, machine, options.python, reach)
        request = YarnRequest(remote, f"pl-{spec.job_id}", parts, options)
        request.service("", "")  # finds what YARN cannot do
        return request

    def render(self, request: YarnRequest) -> str:
        """Return the service as it is submitted, the key masked, and the processes."""
        service = json.dumps(request.service("<address>:<port of the launcher>", "***"), indent=2)
        where = request.options.rm or "<ResourceManager>"
        return (
            f"POST {where}/app/v1/services\n{service}\n\n"
            f"{describe(request.remote.plan, environ=request.remote.environ)}"
        )

    def check(self, request: YarnRequest) -> None:
        """Ask the ResourceManager whether it has the Services API."""
        _services(request).check()

    def submit(self, request: YarnRequest) -> YarnJob:
        """Ask for the service."""
        return YarnJob(request)


class YarnJob(BrokeredJob):
    """A service of YARN; it exists until :meth:`wait` returns."""

    def __init__(self, request: YarnRequest) -> None:
        self._request, self._services, self._names = request, _services(request), names(request.parts)
        remote = replace(request.remote, explain=self._explain)
        super().__init__(remote, Broker("yarn", "paceline.launch.engines.yarn.hub"))
        self.id = request.name
        self._canceller: Canceller | None = None
        self._application = ""
        try:
            self._start(new_job_key())
        except BaseException:
            self.cancel()
            raise

    def wait(self) -> int:
        """Wait for the containers, run the job in them and return its exit code. Then the service is gone."""
        print(f"[launch] YARN service {self.id}", file=sys.stderr, flush=True)
        try:
            self._wait_for_containers()
        except BaseException:
            self.cancel()
            raise
        return super().wait()

    def cancel(self) -> None:
        """End the hub, and so all containers, and destroy the service. Idempotent.

        Raises:
            LaunchError: YARN does not answer; the message says how to destroy the service by hand.
        """
        super().cancel()
        if self._request.key_file:
            Path(self._request.key_file).unlink(missing_ok=True)
        canceller, self._canceller = self._canceller, None
        if canceller is not None:
            try:
                self._destroy()
            finally:
                canceller.release()

    def _start(self, key: str) -> None:
        options = self._request.options
        port = self._start_hub(key)
        address = options.address or address_towards([urlsplit(options.rm).hostname or ""])
        host = address_of(address) if options.address else address
        if not host:
            raise LaunchError("no address of this machine reaches the ResourceManager: -o address=ADDRESS")
        host = f"[{host}]" if ":" in host else host
        url, user, path = self._services.url, self._services.user, self._request.key_file
        undo = [sys.executable, "-P", "-m", "paceline.launch.engines.yarn.service", url, user, self.id]
        self._canceller = Canceller([*undo, path] if path else undo)
        try:
            self._pass_key(key)
            self._services.create(self._request.service(f"{host}:{port}", key))
        except LaunchError:
            self._canceller.release()  # there is no service of ours
            self._canceller = None
            raise

    def _pass_key(self, key: str) -> None:
        """Write the key to its file, or say who can read it."""
        path = self._request.key_file
        if not path:
            network = ", the network on the way there" if self._services.url.startswith("http:") else ""
            print(f"[launch] YARN's administrators{network}, and who may read this service, see the key with which "
                  "containers join; -o key-folder=FOLDER passes it in a file", file=sys.stderr, flush=True)  # fmt: skip
            return
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(key)
        except OSError as error:
            raise LaunchError(f"the hub's key cannot be written: {error}: -o key-folder=FOLDER") from None

    def _start_hub(self, key: str) -> int:
        asked = {
            "socket": self._broker.socket,
            "port": self._request.options.port,
            "key": key,
            "names": list(self._names.values()),
        }
        self._broker.start(json.dumps(asked))
        line = self._broker.says(_START_S)
        if not line.isdecimal():
            raise LaunchError(line or f"the hub did not start within {_START_S:g} s")
        return int(line)

    def _wait_for_containers(self) -> None:
        until = time.monotonic() + self._request.options.wait
        while self._broker.says(_POLL_S) != "all":
            found = self._services.get(self.id) or {}
            self._application = found.get("id") or self._application
            state = found.get("state", "ACCEPTED")
            if state in _OVER:
                raise LaunchError(f"YARN has ended the service before it ran ({state}){self._said(found)}")
            if time.monotonic() > until:
                running = sum(len(one.get("containers") or ()) for one in found.get("components") or ())
                raise LaunchError(
                    f"YARN has started {running} of {len(self._names)} containers within "
                    f"{self._request.options.wait:g} s ({state}): ask for less (cpus=, memory=, gpus=), or wait "
                    f"longer: -o wait=SECONDS{self._said(found)}"
                )

    def _said(self, found: Mapping[str, object]) -> str:
        words = f": {found['diagnostics']}" if found.get("diagnostics") else ""
        return f"{words}; {self._log_hint()}"

    def _log_hint(self) -> str:
        return f"see `yarn logs -applicationId {self._application or '<its id>'}`"

    def _explain(self, host: Host, link: AgentLink) -> str:
        text = "\n".join(link.errors) or link.noise
        return f"the container {self._names[host.name]} ended{': ' if text else ''}{text}; {self._log_hint()}"

    def _destroy(self) -> None:

        def is_gone() -> bool:
            found = self._services.get(self.id)
            return not found or found.get("state") in _OVER

        try:
            self._services.destroy(self.id)
            if not wait_for(is_gone, _DESTROY_S, _POLL_S):
                raise LaunchError(f"the service is still there {_DESTROY_S:g} s after it was destroyed")
        except LaunchError as error:
            raise LaunchError(f"{error}\nthe service may still exist: yarn app -destroy {self.id}") from None


def resource_manager(environ: Mapping[str, str]) -> str:
    """Return the web address of the ResourceManager that Hadoop's own configuration names, or nothing."""
    folder = environ.get("YARN_CONF_DIR") or environ.get("HADOOP_CONF_DIR")
    if not folder:
        return ""
    with contextlib.suppress(OSError, ElementTree.ParseError):
        for one in ElementTree.parse(Path(folder, "yarn-site.xml")).getroot().iter("property"):
            if one.findtext("name") == "yarn.resourcemanager.webapp.address":
                return f"http://{(one.findtext('value') or '').strip()}"
    return ""


def _services(request: YarnRequest) -> Services:
    if not request.options.rm:
        raise LaunchError("where is the ResourceManager? -o rm=http://HOST:8088, or HADOOP_CONF_DIR with yarn-site.xml")
    return Services(request.options.rm, request.options.user or getpass.getuser())
