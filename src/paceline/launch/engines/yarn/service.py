"""The service that runs a job on YARN, and calls of the ResourceManager's Services API (``/app/v1/services``).

``python -m paceline.launch.engines.yarn.service URL USER NAME [FILE]`` destroys a service and the file of its key.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.launch.plan import JobPart
from paceline.launch.worker_groups import amount, whole

Service = dict[str, Any]
"""JSON of the Services API."""

#: YARN puts the name of each container here: that of its component, and its number there.
_INSTANCE = "${COMPONENT_INSTANCE_NAME}"
_SCHEDULER_MB = 512
_DEFAULT_MB = 2048
#: A node manager puts the command between double quotes of a shell, so that it must have nothing special.
_PLAIN = re.compile(r"[\w@%+=:,./-]+")
#: Of a component, for Registry DNS.
_NAME_LENGTH = 44

_CALL_S = 60.0
_PATH = "/app/v1/services"


@dataclass(frozen=True)
class YarnOptions:
    """Options of the backend ``yarn``."""

    rm: str = ""
    """Web address of the ResourceManager, as in ``http://rm:8088``; empty: that of ``yarn-site.xml``."""
    user: str = ""
    """User of requests; empty: the launcher's user."""
    queue: str = ""
    """Queue; empty: the user's default."""
    memory: str = f"{_DEFAULT_MB}Mi"
    """Memory of a process whose group has no ``memory``."""
    time: int = 0
    """Seconds after which YARN ends the job; 0: never."""
    address: str = ""
    """Where containers reach the launcher; empty: the address from which it reaches the ResourceManager."""
    port: int = 0
    """Port where containers reach the launcher; 0: a free one."""
    wait: float = 300.0
    """Seconds that YARN may take to start all containers."""
    python: str = ""
    """Interpreter in the containers; empty: the launcher's."""
    key_folder: str = ""
    """Folder, on this machine and all nodes, for a file with the hub's key; empty: the key is in the service."""

    def __post_init__(self) -> None:
        if self.rm and not re.match(r"https?://[^/]", self.rm):
            raise ValueError(f"rm={self.rm!r} is not a web address such as http://rm:8088")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} does not exist")
        if self.key_folder and not self.key_folder.startswith("/"):
            raise ValueError(f"key-folder={self.key_folder!r} is not an absolute path, which all nodes share")
        if self.time < 0 or not self.wait > 0:
            raise ValueError("time is 0 or more seconds, and wait above 0")
        _megabytes(self.memory)


def make_service(
    name: str, parts: list[JobPart], options: YarnOptions, directory: str, environ: Mapping[str, str], launcher: str
) -> Service:
    """Return the service. Its containers have variables, and reach the hub of the launcher at an address.

    Raises:
        ValueError: a group's request is beyond YARN, or a path cannot be a word of its commands.
    """
    for word in (options.python, directory):
        if not _PLAIN.fullmatch(word):
            raise ValueError(f"{word!r}: YARN's commands take letters, digits and @%+=:,./- in paths only")
    service: Service = {"name": name, "version": "1.0.0"}
    service |= {"queue": options.queue} if options.queue else {}
    service |= {"lifetime": options.time} if options.time else {}
    service["components"] = [_component(part, options, directory, launcher) for part in parts]
    service["configuration"] = {
        "env": dict(environ),
        "properties": {"yarn.service.am-restart.max-attempts": "1"},  # the launcher decides about restarts
    }
    return service


def names(parts: list[JobPart]) -> dict[str, str]:
    """Return the names of the containers by the plan's names of hosts."""
    return {process.host: f"{part.name}-{index}" for part in parts for index, process in enumerate(part.processes)}


def _megabytes(text: str) -> int:
    """Return an amount of memory in MiB, rounded up."""
    return math.ceil(amount("memory", text, 2**20) / 2**20)


def _component(part: JobPart, options: YarnOptions, directory: str, launcher: str) -> Service:
    if len(part.name) > _NAME_LENGTH:
        raise ValueError(f"group {part.name.removeprefix('worker-')}: its name is too long for YARN's Registry DNS")
    module = "paceline.launch.engines.yarn.container"
    words = ["exec", options.python, "-P", "-m", module, launcher, _INSTANCE, directory]
    return {
        "name": part.name,
        "number_of_containers": len(part.processes),
        "launch_command": " ".join(words),
        "restart_policy": "NEVER",
        "resource": _resource(part, options),
    }


def _resource(part: JobPart, options: YarnOptions) -> Service:
    group = part.group
    given: Mapping[str, str] = group.resources if group is not None else {}
    if group is not None and (group.hosts or group.select):
        raise ValueError(f"group {group.name}: YARN chooses the nodes; -o queue=NAME chooses a queue for the whole job")
    memory = _SCHEDULER_MB if part.role == "scheduler" else _megabytes(given.get("memory", options.memory))
    resource: Service = {"cpus": whole("cpus", given.get("cpus", "1")), "memory": str(memory)}
    if "gpus" in given:
        resource["additional"] = {"yarn.io/gpu": {"value": whole("gpus", given["gpus"]), "unit": ""}}
    return resource


# ---- calls -----------------------------------------------------------------------------------------------------------


class Services:
    """The services of one user, whose name requests carry; clusters without Kerberos believe it."""

    def __init__(self, url: str, user: str) -> None:
        self.url, self.user = url.rstrip("/"), user

    def check(self) -> None:
        """Ask whether the API is there."""
        self._call("GET", "/version")

    def create(self, service: Mapping[str, Any]) -> None:
        """Ask for a service."""
        self._call("POST", "", service)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return what YARN says about a service, None if there is none of that name."""
        found = self._call("GET", f"/{name}", missing=True)
        return found or None

    def destroy(self, name: str) -> None:
        """End a service and its containers, if the service exists."""
        self._call("DELETE", f"/{name}", missing=True)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, missing: bool = False
    ) -> dict[str, Any]:
        """Return the JSON of an answer, nothing for 404 if that is expected."""
        url = f"{self.url}{_PATH}{path}?{urllib.parse.urlencode({'user.name': self.user})}"
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_CALL_S) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing:
                return {}
            raise LaunchError(f"YARN refused: {_why(error)}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise LaunchError(
                f"no ResourceManager answers at {self.url} ({reason}): -o rm=URL, as in http://rm:8088"
            ) from None
        return _object(text)


def _why(error: urllib.error.HTTPError) -> str:
    """Return why YARN refused a call, and what to do where that is known."""
    answer = _object(error.read())
    said = answer.get("diagnostics") or answer.get("RemoteException", {}).get("message") or error.reason
    if error.code == 401:
        return f"{said}: it does not know this user (-o user=NAME); Kerberos is not supported"
    if error.code == 404:
        return "it has no Services API: its yarn-site.xml needs yarn.webapp.api-service.enable=true (Hadoop 3.1)"
    return str(said)


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:  # some answers are empty, errors of a proxy are HTML
        return {}
    return found if isinstance(found, dict) else {}


def main(words: Sequence[str]) -> int:
    """Destroy a service, after the file of its key; return the exit code."""
    url, user, name, *files = words
    for one in files:
        Path(one).unlink(missing_ok=True)
    Services(url, user).destroy(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
