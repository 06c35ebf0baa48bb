"""The backend that gives a job to Kubernetes by kubectl."""

from __future__ import annotations

import sys
from dataclasses import replace

from paceline.errors import LaunchError
from paceline.launch.backends import Job
from paceline.launch.engines.k8s.kubectl import Kubectl
from paceline.launch.engines.k8s.kubernetes import JUDGES, KubernetesCrew
from paceline.launch.engines.k8s.manifests import Manifests, make_manifests
from paceline.launch.engines.k8s.pods import LAYOUTS
from paceline.launch.host_list import LOCALHOST
from paceline.launch.job_spec import JobSpec
from paceline.launch.planner import Machine
from paceline.launch.supervise.supervisor import SupervisedJob

#: The first version whose Indexed Jobs are stable.
_INDEXED = (1, 24)


class KubernetesBackend:
    """Every process is a pod; the engine starts them, and the launcher supervises."""

    def plan(self, spec: JobSpec, machine: Machine) -> Manifests:
        """Make the objects of the job.

        Raises:
            ValueError: an option is impossible, or the layout cannot satisfy the spec.
        """
        return make_manifests(spec, machine)

    def render(self, request: Manifests) -> str:
        """Return the objects as YAML that kubectl takes, the key masked."""
        return request.text

    def check(self, request: Manifests) -> None:
        """Ask the cluster whether it knows the objects of the layout, and whether we may create them.

        Raises:
            LaunchError: kubectl is missing, the cluster does not answer, or it does not support the layout.
        """
        kubectl = Kubectl(request.options.namespace)
        names = set(kubectl.run(["api-resources", "--output", "name"]).split())
        layout = request.options.layout
        missing = JUDGES.get(layout, "")
        if missing and missing not in names:
            others = ", ".join(f"{name} ({what})" for name, what in LAYOUTS.items() if name != layout)
            raise LaunchError(
                f"the cluster has no {missing}: layout {layout} needs {LAYOUTS[layout]}; "
                f"-o layout=… chooses another: {others}"
            )

    def submit(self, request: Manifests) -> Job:
        """Return the job; layout ``jobs`` becomes ``pods`` on a cluster without Indexed Jobs.

        Raises:
            LaunchError: the cluster does not answer.
        """
        request = _fitting(request)
        processes = tuple(replace(process, host=LOCALHOST) for process in request.plan)  # Kubernetes chooses nodes
        restarts = 0 if request.options.layout in JUDGES else request.plan.max_restarts
        plan = replace(request.plan, processes=processes, hosts=(), max_restarts=restarts)
        kubectl = Kubectl(request.options.namespace)
        return SupervisedJob(plan, lambda around: KubernetesCrew(around, request, kubectl))


def _fitting(request: Manifests) -> Manifests:
    """Return the objects that this cluster knows.

    Raises:
        LaunchError: the cluster does not answer.
    """
    if request.options.layout != "jobs":
        return request
    major, minor = Kubectl(request.options.namespace).version()
    if (major, minor) >= _INDEXED:
        return request
    print(f"[launch] Kubernetes {major}.{minor} has no Indexed Jobs: a Job per process", file=sys.stderr, flush=True)
    spec = replace(request.spec, options={**request.spec.options, "layout": "pods"})
    return make_manifests(spec, request.machine)
