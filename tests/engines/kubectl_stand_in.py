"""A kubectl for tests of layout ``pods``: the objects are files in a folder, and pods are processes of this machine.

It takes the calls that paceline makes, and answers in the forms of the real one. It is no Kubernetes: it shows that the
launcher creates, follows, judges and deletes a job as it should, not that a cluster accepts the objects.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(os.environ["KUBECTL_STAND_IN"])
LABEL = "app.kubernetes.io/instance"


def main(words: list[str]) -> int:
    match words:
        case ["api-resources", *_]:
            print("pods\njobs.batch\nservices\nsecrets")
        case ["version", "--output", "json"]:
            print(json.dumps({"serverVersion": {"gitVersion": "v1.20.2"}}))
        case ["create" | "apply", "-f", "-"]:
            for one in yaml.safe_load_all(sys.stdin):
                create(one)
        case ["get", "pods", "--selector", selector, *_]:
            print(json.dumps({"items": [status(pod) for pod in pods(selector)]}))
        case ["logs", *flags, name]:
            logs(FOLDER / name.removeprefix("pod/"), "--follow" in flags)
        case ["delete", _, "--selector", selector, *_]:
            for pod in pods(selector):
                end(pod)
            for path in FOLDER.glob("*.json"):
                if json.loads(path.read_text())["metadata"]["labels"][LABEL] == selector.partition("=")[2]:
                    path.unlink()
        case _:
            print(f"error: unknown call {words}", file=sys.stderr)
            return 1
    return 0


def create(one: dict[str, Any]) -> None:
    path = FOLDER / f"{one['kind']}-{one['metadata']['name']}.json"
    path.write_text(json.dumps(one))
    if one["kind"] == "Job":
        assert one["spec"]["backoffLimit"] == 0
        start(one["metadata"]["name"], one["spec"]["template"])


def start(name: str, template: dict[str, Any]) -> None:
    """Start a pod as the kubelet does: variables of Services first, then those of the container, in order."""
    folder = FOLDER / name
    folder.mkdir()
    (folder / "template").write_text(json.dumps(template))
    services = [json.loads(path.read_text())["metadata"]["name"] for path in FOLDER.glob("Service-*")]
    env = {f"{service.upper().replace('-', '_')}_SERVICE_HOST": "127.0.0.1" for service in services}
    [container] = template["spec"]["containers"]
    for one in container["env"]:
        reference = one.get("valueFrom", {}).get("secretKeyRef")
        if reference:
            secret = json.loads((FOLDER / f"Secret-{reference['name']}.json").read_text())
            env[one["name"]] = secret["stringData"][reference["key"]]
        else:
            env[one["name"]] = expanded(one["value"], env)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    script = '"$@" >log 2>&1; echo $? >code.new; mv code.new code'
    command = [expanded(word, env) for word in container["command"]]
    process = subprocess.Popen(
        ["sh", "-c", script, "sh", "env", "-C", os.environ["KUBECTL_CWD"], *command],
        cwd=folder, env=own | env, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    (folder / "pid").write_text(str(process.pid))


def expanded(text: str, env: dict[str, str]) -> str:
    """Replace ``$(NAME)``, and ``$$`` by ``$``."""
    return re.sub(r"\$(?:\$|\((\w+)\))", lambda m: "$" if m[1] is None else env.get(m[1], m[0]), text)


def pods(selector: str) -> list[Path]:
    name, _, value = selector.partition("=")
    found = [path.parent for path in FOLDER.glob("*/template")]
    return [pod for pod in found if json.loads((pod / "template").read_text())["metadata"]["labels"][name] == value]


def status(pod: Path) -> dict[str, Any]:
    template = json.loads((pod / "template").read_text())
    state: dict[str, Any] = {"running": {}}
    phase = "Running"
    if (pod / "code").exists():
        code = int((pod / "code").read_text())
        ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((pod / "code").stat().st_mtime))
        state = {"terminated": {"exitCode": code, "finishedAt": ended, "reason": "Error" if code else "Completed"}}
        phase = "Failed" if code else "Succeeded"
    found = {"phase": phase, "containerStatuses": [{"state": state}]}
    meta = {"name": pod.name, "labels": template["metadata"]["labels"]}
    return {"metadata": meta, "spec": {"nodeName": "here"}, "status": found}


def logs(pod: Path, follow: bool) -> None:
    with open(pod / "log", "rb") as file:
        while True:
            over = (pod / "code").exists() or not pod.exists()
            sys.stdout.buffer.write(file.read())
            sys.stdout.flush()
            if over or not follow:
                return
            time.sleep(0.05)


def end(pod: Path) -> None:
    pid = int((pod / "pid").read_text())
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(pid, signum)
            time.sleep(0.3)
        except ProcessLookupError:
            break
    shutil.rmtree(pod)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
