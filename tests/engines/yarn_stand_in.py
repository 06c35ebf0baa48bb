"""A stand-in for YARN's ResourceManager: the Services API of Hadoop 3, with containers as processes of this machine.

It follows Hadoop's documentation of the API: field names, types and enumerations of a service, status codes, errors,
``user.name``, states. A field that the documentation does not have is refused. A container starts as a node manager
starts it: variables are exported in a script, the command stands between double quotes of a shell, in a fresh folder.
It is no YARN: it shows that the launcher speaks the documented language, not that a cluster gives it containers.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

#: Fields by definition: their type, or the definition of their elements. A question mark: only in answers.
SCHEMA: Mapping[str, Mapping[str, Any]] = {
    "Service": {
        "name!": str, "version!": str, "description": str, "id?": str, "artifact": "Artifact", "resource": "Resource",
        "launch_time?": int, "number_of_running_containers?": int, "lifetime": int, "components": ["Component"],
        "configuration": "Configuration", "state": ("ACCEPTED", "STARTED", "STABLE", "STOPPED", "FAILED", "FLEX"),
        "quicklinks": dict, "queue": str, "kerberos_principal": dict, "docker_client_config": str,
    },
    "Component": {
        "name!": str, "state?": str, "dependencies": [str], "readiness_check": dict, "artifact": "Artifact",
        "launch_command": str, "resource": "Resource", "number_of_containers": int, "containers?": list,
        "run_privileged_container": bool, "placement_policy": dict, "configuration": "Configuration",
        "quicklinks": [str], "restart_policy": ("ALWAYS", "ON_FAILURE", "NEVER"),
    },
    "Resource": {"profile": str, "cpus": int, "memory": str, "additional": {"value!": int, "unit": str}},
    "Configuration": {"properties": {"": str}, "env": {"": str}, "files": [dict]},
    "Artifact": {"id!": str, "type": ("DOCKER", "TARBALL", "SERVICE"), "uri": str},
}  # fmt: skip


def faults(value: Any, kind: Any, where: str) -> list[str]:
    """Return what is wrong with a value."""
    if isinstance(kind, str):
        return _object_faults(value, SCHEMA[kind], f"{where} ({kind})")
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{where} is not an array"]
        return [text for index, one in enumerate(value) for text in faults(one, kind[0], f"{where}[{index}]")]
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return [f"{where} is not an object"]
        if "" in kind:
            return [text for name, one in value.items() for text in faults(one, kind[""], f"{where}.{name}")]
        return [text for name, one in value.items() for text in _object_faults(one, kind, f"{where}.{name}")]
    if isinstance(kind, tuple):
        return [] if value in kind else [f"{where} is not one of {', '.join(kind)}"]
    return [] if type(value) is kind else [f"{where} is not of type {kind.__name__}"]


def _object_faults(value: Any, fields: Mapping[str, Any], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where} is not an object"]
    known = {name.rstrip("!?"): (name[-1], kind) for name, kind in fields.items()}
    found = [f"{where} has no {name[:-1]}" for name in fields if name.endswith("!") and name[:-1] not in value]
    for name, one in value.items():
        if name not in known:
            found.append(f"{where} has an unknown field {name}")
        elif known[name][0] == "?":
            found.append(f"{where}.{name} is only in answers")
        else:
            found += faults(one, known[name][1], f"{where}.{name}")
    return found


@dataclass
class Container:
    """A container that was started."""

    id: str
    instance: str
    folder: Path
    process: subprocess.Popen[bytes]


@dataclass
class Running:
    """A service and its containers."""

    body: dict[str, Any]
    user: str
    id: str
    containers: list[Container] = field(default_factory=list)
    diagnostics: str = ""


class Yarn:
    """A ResourceManager with nodes.

    Args:
        folder: where containers run.
        vcores: of the cluster.
        memory_mb: of the largest container.
        enabled: whether it has the Services API.
    """

    def __init__(self, folder: Path, vcores: int = 16, memory_mb: int = 8192, enabled: bool = True) -> None:
        self.folder, self.vcores, self.memory_mb, self.enabled = folder, vcores, memory_mb, enabled
        self.services: dict[str, Running] = {}
        self.bodies: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._began = int(time.time() * 1000)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Calls", (_Calls,), {"yarn": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Yarn:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for name in list(self.services):
            self.destroy(name)

    def create(self, body: Any, user: str) -> tuple[int, Any]:
        """Start a service."""
        wrong = faults(body, "Service", "service")
        if not wrong and not re.fullmatch(r"[a-z][a-z0-9-]*", body["name"]):
            wrong = [f"Invalid service name {body['name']}"]
        wrong = wrong or [text for one in body.get("components", []) for text in self._refusals(one)]
        if wrong:
            return 400, {"diagnostics": "; ".join(wrong)}
        with self._lock:
            if body["name"] in self.services:
                return 400, {"diagnostics": f"Service name {body['name']} is already taken."}
            self.bodies.append(body)
            one = Running(body, user, f"application_{self._began}_{len(self.bodies):04d}")
            self.services[body["name"]] = one
            self._start(one)
        return 202, {"uri": f"/v1/services/{body['name']}", "diagnostics": f"Application ID: {one.id}"}

    def _refusals(self, component: dict[str, Any]) -> list[str]:
        found = [] if component.get("launch_command") else [f"{component['name']}: launch_command is empty"]
        if int(component["resource"]["memory"]) > self.memory_mb:
            found.append(f"Requested more memory than configured max {self.memory_mb}")
        return found

    def _start(self, one: Running) -> None:
        """Start as many containers as there is room for; the others wait, here for ever."""
        room = self.vcores
        for component in one.body["components"]:
            for index in range(component["number_of_containers"]):
                room -= component["resource"]["cpus"]
                if room >= 0:
                    one.containers.append(self._container(one, component, index))

    def _container(self, one: Running, component: dict[str, Any], index: int) -> Container:
        instance = f"{component['name']}-{index}"
        name = f"container_{one.id.removeprefix('application_')}_01_{len(one.containers) + 2:06d}"
        folder = self.folder / name
        folder.mkdir()
        tokens = {
            "SERVICE_NAME": one.body["name"], "USER": one.user, "COMPONENT_NAME": component["name"],
            "COMPONENT_INSTANCE_NAME": instance, "COMPONENT_ID": str(index), "CONTAINER_ID": name,
        }  # fmt: skip
        env = {**one.body["configuration"].get("env", {}), **component.get("configuration", {}).get("env", {})}
        exports = "".join(f"export {key}={shlex.quote(_filled_in(value, tokens))}\n" for key, value in env.items())
        command = _filled_in(component["launch_command"], tokens)
        script = folder / "launch_container.sh"
        script.write_text(
            f"#!/bin/bash\nset -o pipefail -e\nexport USER={one.user} CONTAINER_ID={name}\n{exports}"
            f'exec /bin/bash -c "{command} 1>{folder}/stdout.txt 2>{folder}/stderr.txt"\n'
        )
        keep = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        process = subprocess.Popen(["bash", str(script)], cwd=folder, env=keep, start_new_session=True)
        return Container(name, instance, folder, process)

    def get(self, name: str) -> tuple[int, Any]:
        """Describe a service."""
        one = self.services.get(name)
        if one is None:
            return 404, {"diagnostics": f"Service {name} does not exist"}
        living = [container for container in one.containers if container.process.poll() is None]
        failed = [container for container in one.containers if container.process.poll()]
        wanted = sum(component["number_of_containers"] for component in one.body["components"])
        state = "FAILED" if failed else "STABLE" if len(living) == wanted else "STARTED"
        components = [
            {**component, "containers": [
                {"id": container.id, "component_instance_name": container.instance, "state": "READY"}
                for container in living
                if container.instance.rpartition("-")[0] == component["name"]
            ]}
            for component in one.body["components"]
        ]  # fmt: skip
        diagnostics = [f"{container.instance} exited with {container.process.returncode}" for container in failed]
        return 200, {
            **one.body, "id": one.id, "state": state, "components": components, "diagnostics": "; ".join(diagnostics),
        }  # fmt: skip

    def destroy(self, name: str) -> tuple[int, Any]:
        """End all containers: SIGTERM, and SIGKILL a quarter of a second later, as node managers have it."""
        with self._lock:
            one = self.services.pop(name, None)
        if one is None:
            return 404, {"diagnostics": f"Service {name} does not exist"}
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for container in one.containers:
                if container.process.poll() is None:
                    os.killpg(container.process.pid, signum)
            time.sleep(0.25)
        for container in one.containers:
            container.process.wait()
        return 200, {"diagnostics": f"Successfully destroyed service {name}"}


def _filled_in(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda found: tokens.get(found[1], found[0]), text)


class _Calls(BaseHTTPRequestHandler):
    yarn: Yarn

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def log_message(self, format: str, *args: Any) -> None:
        """Be silent."""

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        code, body = self._handle(method, url.path, parse_qs(url.query).get("user.name", [""])[0], data)
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _handle(self, method: str, path: str, user: str, data: bytes) -> tuple[int, Any]:
        if not user:
            return 401, {"RemoteException": {"exception": "AuthorizationException", "message": "no user"}}
        if not self.yarn.enabled or not path.startswith("/app/v1/services"):
            return 404, {"RemoteException": {"exception": "NotFoundException", "message": "null for uri"}}
        name = path.removeprefix("/app/v1/services").strip("/")
        match method, name:
            case "GET", "version":
                return 200, {"version": "3.4"}
            case "POST", "":
                return self.yarn.create(json.loads(data), user)
            case "GET", _ if name:
                return self.yarn.get(name)
            case "DELETE", _ if name:
                return self.yarn.destroy(name)
        return 405, {}
