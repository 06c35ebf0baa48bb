"""The manifests against the schemas of Kubernetes, JobSet and Kubeflow Trainer, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.engines.k8s.pods import LAYOUTS
from tests.launch.engines.k8s.test_manifests import manifests

PYTHON = Path(os.environ.get("PACELINE_TEST_ENGINES_VENV", "/nowhere"), "bin", "python")
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs kubernetes-validate and kubeflow-trainer-api (PACELINE_TEST_ENGINES_VENV)"
)

#: The oldest and the newest that must work; indexed Jobs with stable host names are older than both.
VERSIONS = ("1.27", "1.34")

CHECK = """\
import json, sys
import kubernetes_validate
import kubeflow_trainer_api.models as models
OWN = {"JobSet": "JobsetV1alpha2JobSet", "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
       "TrainJob": "TrainerV1alpha1TrainJob"}
SPECS = {"JobSet": "JobsetV1alpha2JobSetSpec"}

def unknown(given, back, path):
    "Return the fields that a model has dropped."
    if isinstance(given, dict):
        inner = [(f"{path}.{key}", value, (back or {}).get(key)) for key, value in given.items()]
    elif isinstance(given, list):
        inner = [(f"{path}[{i}]", value, back[i]) for i, value in enumerate(given)]
    else:
        return []
    lost = [name for name, value, found in inner if found is None and value is not None]
    return lost + [one for name, value, found in inner if found is not None for one in unknown(value, found, name)]

problems = []
for one in json.load(sys.stdin):
    kind = one["kind"]
    if kind in OWN or kind in SPECS:
        if kind in SPECS:
            one, name = one["spec"], SPECS[kind]
        else:
            name = OWN[kind]
        model = getattr(models, name)
        problems += unknown(one, model.from_dict(one).to_dict(), kind)
        continue
    for version in sys.argv[1:]:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{kind} in {version}: {error.message}")
print(json.dumps(problems))
"""


def problems(objects: list[dict[str, Any]]) -> list[str]:
    done = subprocess.run(
        [str(PYTHON), "-c", CHECK, *VERSIONS], input=json.dumps(objects), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


def jobs_of(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the Jobs that a JobSet makes of its templates."""
    specs = [one["spec"] for one in objects if one["kind"] == "JobSet"]
    specs += [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "ClusterTrainingRuntime"]
    found = []
    for spec in specs:
        for one in spec["replicatedJobs"]:
            meta = {"name": one["name"], **one["template"].get("metadata", {})}
            found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": one["template"]["spec"]})
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_manifests_are_valid(layout: str) -> None:
    made = manifests(layout)
    objects = [made.secret("k" * 40), *made.objects]
    assert problems([*objects, *jobs_of(objects)]) == []


def test_a_wrong_field_would_be_found() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"portz": []}}
    [jobset] = manifests("jobset").objects
    changed = {**jobset, "spec": {**jobset["spec"], "sucessPolicy": {}}}
    found = problems([wrong, changed])
    assert any("portz" in one for one in found)
    assert "JobSet.sucessPolicy" in found
