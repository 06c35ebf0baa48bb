from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import check_names
from paceline.launch import JobSpec, Late, Machine, WorkerGroup
from paceline.launch.backends import typed_options
from paceline.launch.engines.k8s.manifests import Manifests, make_manifests
from paceline.launch.engines.k8s.pods import LAYOUTS, KubernetesOptions
from tests.launch import golden

GOLDEN = Path(__file__).parent / "golden"
MACHINE = Machine("/opt/python", {}, {}, "/home/me")
GROUPS = (
    WorkerGroup(
        "a100",
        2,
        select={"pool": "a100"},
        resources={"cpus": "4", "gpus": "1", "memory": "8Gi"},
        env={"NOTE": 'spaces, commas, "quotes" and $(HOME)'},
    ),
    WorkerGroup("old", 1, args=("--batch-size", "8"), weight=0.5),
)


def spec(layout: str, **changes: Any) -> JobSpec:
    options = {"image": "registry/train:1", "layout": layout, **changes.pop("options", {})}
    given: dict[str, Any] = {"command": ("python", "train.py"), "num_servers": 2, "job_id": "7f3a", "max_restarts": 3}
    given |= {"num_workers": 2, "torchrun_env": False} if layout == "trainer" else {"groups": GROUPS}
    return JobSpec(options=options, **(given | changes))


def manifests(layout: str, **changes: Any) -> Manifests:
    return make_manifests(spec(layout, **changes), MACHINE)


def containers(value: Any) -> list[dict[str, Any]]:
    """Return all containers in an object."""
    if isinstance(value, dict):
        return [*value.get("containers", []), *(one for inner in value.values() for one in containers(inner))]
    return [one for inner in value for one in containers(inner)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_manifests_are_those_that_somebody_has_read(layout: str) -> None:
    golden.check(GOLDEN / f"{layout}.yaml", manifests(layout).text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_key_is_only_in_the_secret(layout: str) -> None:
    made, key = manifests(layout), "k" * 40
    assert made.secret(key)["stringData"] == {"job-key": key}
    assert key not in made.text
    for container in containers(list(made.objects)):
        [entry] = [one for one in container["env"] if one["name"] == "PACELINE_JOB_KEY"]
        assert entry["valueFrom"]["secretKeyRef"] == {"name": "pl-7f3a-key", "key": "job-key"}


def test_a_job_without_key_or_servers_has_no_secret_and_no_scheduler() -> None:
    made = manifests("jobset", num_servers=0)
    assert not made.plan.needs(Late.JOB_KEY)
    assert "Secret" not in made.text
    [jobset] = made.objects
    assert [one["name"] for one in jobset["spec"]["replicatedJobs"]] == ["worker-a100", "worker-old"]
    assert not any("dependsOn" in one for one in jobset["spec"]["replicatedJobs"])


def test_kubernetes_replaces_nothing_in_what_the_user_wrote() -> None:
    made = manifests("pods", command=("echo", "$(HOME) $$ $x"))
    worker = next(one for one in containers(list(made.objects)) if one["name"] == "worker")
    assert worker["command"] == ["echo", "$$(HOME) $$$$ $$x"]
    note = next(one["value"] for one in worker["env"] if one["name"] == "NOTE")
    assert note == 'spaces, commas, "quotes" and $$(HOME)'


def test_restarts_by_the_launcher_are_counted() -> None:
    made = make_manifests(spec("jobs"), MACHINE, restart=2)
    for container in containers(list(made.objects)):
        assert {"name": "PACELINE_RESTART", "value": "2"} in container["env"]


def test_options_reach_the_pods() -> None:
    options = {
        "python": "/venv/bin/python",
        "pull": "Never",
        "service-account": "trainer",
        "env-from": "aws,wandb",
        "volumes": "/data:/data:ro, claim=ckpt:/ckpt",
        "shared-memory": "2Gi",
        "port": "7000",
        "directory": "/code",
    }
    made = manifests("jobs", options=options)
    job = next(one for one in made.objects if one["metadata"]["name"] == "pl-7f3a-worker-old")
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    chosen = (pod["serviceAccountName"], container["imagePullPolicy"], container["workingDir"])
    assert chosen == ("trainer", "Never", "/code")
    assert container["envFrom"] == [{"secretRef": {"name": "aws"}}, {"secretRef": {"name": "wandb"}}]
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/data", "/ckpt", "/dev/shm"]
    assert [one.get("readOnly", False) for one in container["volumeMounts"]] == [True, False, False]
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "ckpt"}
    assert 'value: "tcp://pl-7f3a-scheduler-0.pl-7f3a:7000"' in made.text
    scheduler = next(one for one in containers(list(made.objects)) if one["name"] == "scheduler")
    assert scheduler["command"] == ["/venv/bin/python", "-P", "-m", "paceline", "scheduler"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "needs an image"),
        ({"image": "x", "layout": "jobsets"}, "did you mean 'jobset'"),
        ({"image": "x", "imagee": "y"}, "no option 'imagee'"),
        ({"image": "x", "volumes": "data:/data"}, "neither an absolute path nor claim=NAME"),
        ({"image": "x", "volumes": "/data:/data:rw"}, "volume '/data:/data:rw' is not"),
        ({"image": "x", "namespace": "My Space"}, "is not a name of Kubernetes"),
        ({"image": "x", "pull": "always"}, "is not Always"),
        ({"image": "x", "port": "0"}, "port=0 does not exist"),
        ({"image": "x", "directory": "code"}, "directory='code' is not an absolute path"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        typed_options("k8s", KubernetesOptions, options)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"torchrun_env": True}, "--no-torchrun-env"),
        ({"num_servers": 0}, "needs a scheduler"),
        ({"num_workers": 0, "groups": GROUPS}, "one worker group"),
    ],
)
def test_what_kubeflow_cannot_do_is_said(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        manifests("trainer", **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_variable_looks_like_a_setting_that_does_not_exist(layout: str) -> None:
    made = manifests(layout)
    services = [one["metadata"]["name"] for one in made.objects if one["kind"] == "Service"]
    links = {f"{name.upper().replace('-', '_')}_SERVICE_HOST": "10.0.0.1" for name in services}
    for container in containers(list(made.objects)):
        check_names({one["name"]: "1" for one in container["env"]} | links)
