"""The pods of a job, as the supervisor sees them: it judges them by the lifecycle of every job.

All objects are created at once. Pods are listed every ``_POLL_S``, and their output is followed. The end of a pod is an
``Exited`` with the reason that Kubernetes gives, in the order of the ends. Kubernetes cannot signal single processes,
so every signal deletes all that has the job's label, and waits until it is gone. The scheduler of such a job has no
pipe to the launcher: exit codes alone decide, and no worker's death is survived.

JobSet and Kubeflow judge themselves whether the job is over, and start it again; ends count when they have judged.

If the launcher is killed, a process of it that is left deletes the job
(:class:`~paceline.launch.supervise.guardian.Canceller`). If its machine is lost, the pods run to their own end; a
JobSet that has ended is then deleted after ``TTL_S``.

A pod that cannot start (its image does not exist) is a failure after ``start_s``; a pod that waits for a free node is
not, because a queue may be long. If the cluster does not answer for ``start_s`` the job is given up, and the error says
how to delete it.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from paceline.errors import LaunchError
from paceline.launch.backends import Job
from paceline.launch.engines.k8s.kubectl import Kubectl, Pod, pods, verdict
from paceline.launch.engines.k8s.manifests import Manifests, documents, make_manifests
from paceline.launch.engines.k8s.pods import LAYOUTS
from paceline.launch.engines.programs import Patience
from paceline.launch.host_list import LOCALHOST
from paceline.launch.job_spec import JobSpec
from paceline.launch.plan import Late, ProcessName, ProcessSpec
from paceline.launch.planner import Machine
from paceline.launch.supervise.console import OUT
from paceline.launch.supervise.crew import Processes, serve
from paceline.launch.supervise.events import Complete, Exited, NotStarted, Ready, Runs, Started
from paceline.launch.supervise.guardian import Canceller
from paceline.launch.supervise.supervisor import SupervisedJob, Surroundings

_POLL_S = 1.0
#: How long kubectl waits until a job is gone. Its call may take longer, so that kubectl names objects left.
_DELETE_S, _DELETE_CALL_S = 120, 130
#: How long the last lines of pods that have ended may take to arrive.
_DRAIN_S = 3.0

#: By layout: the object that says how the job goes, if the engine decides; and the kinds to delete.
JUDGES = {"jobset": "jobsets.jobset.x-k8s.io", "trainer": "trainjobs.trainer.kubeflow.org"}
_KINDS = {
    "jobset": "jobsets.jobset.x-k8s.io,secrets",
    "trainer": "trainjobs.trainer.kubeflow.org,clustertrainingruntimes.trainer.kubeflow.org,secrets",
    "jobs": "jobs,services,secrets",
    "pods": "jobs,services,secrets",
}


class KubernetesCrew(Processes):
    """Creates the objects of a job, follows its pods, and deletes everything; ``manifests`` are those of run 0."""

    hears_scheduler = False

    def __init__(self, around: Surroundings, manifests: Manifests, kubectl: Kubectl) -> None:
        self._around, self._kubectl = around, kubectl
        restart = int(around.known[Late.RESTART])
        self._manifests = make_manifests(manifests.spec, manifests.machine, restart) if restart else manifests
        self._graces = manifests.spec.graces
        self._label = f"app.kubernetes.io/instance={manifests.name}"
        self._judge = JUDGES.get(manifests.options.layout)
        self._is_gone = False
        self._poll_at = 0.0
        self._began, self._patience = time.monotonic(), Patience(self._graces.start_s, around.console.say)
        self._failed_at: float | None = None
        """When the engine has judged that the job has failed."""
        self._ended: set[ProcessName] = set()
        self._over: set[str] = set()
        """Pods that have ended."""
        self._followed: set[str] = set()
        self._following: dict[int, tuple[Pod, subprocess.Popen[bytes]]] = {}
        self._canceller = Canceller(kubectl.words(self._deletion()))

    def opening(self) -> bool:
        """Create the Secret and all objects; return False."""
        key = self._around.known.get(Late.JOB_KEY)
        if key:
            self._kubectl.run(["create", "-f", "-"], documents([self._manifests.secret(key)]))
        self._kubectl.run(["apply", "-f", "-"], documents(self._manifests.objects))
        return False

    def start(self, process: ProcessSpec, known: Mapping[Late, str]) -> None:
        """Do nothing: the pod exists already, and finds the scheduler by its name. Joins are not reported."""
        if process.role == "scheduler":
            self._around.take(Ready())
            self._around.take(Complete())

    def deadline(self) -> float | None:
        """Return when to list the pods again."""
        return None if self._is_gone else self._poll_at

    def check(self) -> None:
        """List the pods, and report their state.

        Raises:
            LaunchError: the cluster has not answered for too long, or the engine says that the job failed and no pod
                says why.
        """
        if self._is_gone or time.monotonic() < self._poll_at:
            return
        try:
            seen = self._patience.ask(self._look_at_cluster, None)
        finally:
            self._poll_at = time.monotonic() + _POLL_S
        if seen is not None:
            found, ended_well = seen
            for pod in found:
                if pod.has_started:
                    self._follow(pod)
            self._report(found, ended_well)

    def _look_at_cluster(self) -> tuple[list[Pod], bool | None]:
        """Return the pods, and whether the job has ended well, where the engine decides."""
        found = pods(self._kubectl.get(["pods", "--selector", self._label]))
        return found, verdict(self._kubectl.get([self._judge, self._manifests.name])) if self._judge else None

    def look(self, members: Collection[ProcessName]) -> None:
        """Tell that servers and scheduler use no CPU time, as far as is known; workers may take their time."""
        for member in members:
            if member.role != "worker":
                self._around.take(Runs(member, 0.0))

    def send(self, signum: int, members: Collection[ProcessName]) -> None:
        """Delete the job: Kubernetes has no other signal."""
        self._delete()
        for process in self._manifests.plan:
            self._end(process.member, 128 + signal.SIGTERM)

    def finish(self) -> None:
        """Delete everything of the job and wait until it is gone."""
        self._delete()

    def close(self) -> None:
        """End the processes that follow the pods."""
        for fd in list(self._following):
            self._unfollow(fd)

    def _report(self, found: Sequence[Pod], ended_well: bool | None) -> None:
        over = [pod for pod in found if pod.code is not None or pod.phase == "Failed"]
        self._over = {pod.name for pod in over}
        if ended_well:
            for process in self._manifests.plan:
                self._end(process.member, 0)
        elif self._judge is None or ended_well is False:
            for pod in sorted(over, key=lambda pod: (pod.ended or "9", pod.member)):
                what = f"{pod.reason or 'failed'} on {pod.node or 'no node'} (pod {pod.name})"
                self._end(pod.member, pod.code or int(pod.phase == "Failed"), what)
        if ended_well is False and not any(pod.code or pod.phase == "Failed" for pod in over):
            self._wait_for_reason()
        if time.monotonic() > self._began + self._graces.start_s:
            for pod in found:
                if pod.hopeless:
                    self._around.take(NotStarted(pod.member, f"cannot start: {pod.reason} (pod {pod.name})"))

    def _wait_for_reason(self) -> None:
        """Give pods time to show why the engine says that the job has failed."""
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        if now > self._failed_at + self._graces.survivors_s:
            name = self._manifests.name
            raise LaunchError(f"{name} failed, and no pod says why: kubectl describe {self._judge} {name}")

    def _end(self, member: ProcessName, code: int, what: str = "") -> None:
        if member not in self._ended:
            self._ended.add(member)
            self._around.take(Exited(member, code, what))

    def _deletion(self) -> list[str]:
        """Return the words for kubectl that delete everything of the job; pods go with what owns them."""
        return ["delete", _KINDS[self._manifests.options.layout], *self._flags(), "--cascade=foreground"]

    def _flags(self) -> list[str]:
        return ["--selector", self._label, "--ignore-not-found", "--timeout", f"{_DELETE_S}s"]

    def _delete(self) -> None:
        if self._is_gone:
            return
        self._is_gone = True
        self._drain()
        try:
            self._kubectl.run(self._deletion(), limit_s=_DELETE_CALL_S)
            self._kubectl.run(["delete", "pods", *self._flags()], limit_s=_DELETE_CALL_S)
        except LaunchError as error:
            raise LaunchError(f"{error}\nthe job may still run: kubectl delete all -l {self._label}") from error
        self._canceller.release()

    def _drain(self) -> None:

        def is_shown() -> bool:
            return all(pod.name not in self._over for pod, _ in self._following.values())

        serve(self._around.selector, _DRAIN_S, is_shown)

    def _follow(self, pod: Pod) -> None:
        """Show a pod's output, from its beginning to its end."""
        if pod.name in self._followed:
            return
        self._followed.add(pod.name)
        process = self._kubectl.follow(pod.name)
        assert process.stdout is not None
        fd = process.stdout.fileno()
        self._following[fd] = (pod, process)
        self._around.selector.register(fd, selectors.EVENT_READ, partial(self._show, fd))
        self._around.take(Started(pod.member, f"pod {pod.name}"))

    def _show(self, fd: int) -> None:
        pod, _ = self._following[fd]
        data = os.read(fd, 65536)
        if data:
            self._around.console.feed(pod.member, OUT, data)
        else:
            self._around.console.close(pod.member, OUT)
            self._unfollow(fd)

    def _unfollow(self, fd: int) -> None:
        _, process = self._following.pop(fd)
        self._around.selector.unregister(fd)
        process.kill()
        process.communicate()


#: The first version whose Indexed Jobs are stable.
_INDEXED = (1, 24)


class KubernetesBackend:
    """Every process is a pod; the engine starts them, and the launcher supervises."""

    reads = frozenset({"select", "cpus", "gpus", "memory"})

    def plan(self, spec: JobSpec, machine: Machine) -> Manifests:
        """Make the objects of the job."""
        if spec.replace:
            raise ValueError("--replace changes nothing on Kubernetes, whose engine starts the pods: leave it out")
        return make_manifests(spec, machine)

    def render(self, request: Manifests) -> str:
        """Return the objects as YAML that kubectl takes, the key masked."""
        return request.text

    def check(self, request: Manifests) -> None:
        """Ask the cluster whether it knows the objects of the layout, and whether we may create them."""
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
        """Return the job; layout ``jobs`` becomes ``pods`` on a cluster without Indexed Jobs."""
        request = _fitting(request)
        processes = tuple(replace(process, host=LOCALHOST) for process in request.plan)  # Kubernetes chooses nodes
        restarts = 0 if request.options.layout in JUDGES else request.plan.max_restarts
        plan = replace(request.plan, processes=processes, hosts=(), max_restarts=restarts)
        kubectl = Kubectl(request.options.namespace)
        return SupervisedJob(plan, lambda around: KubernetesCrew(around, request, kubectl))


def _fitting(request: Manifests) -> Manifests:
    """Return the objects that this cluster knows."""
    if request.options.layout != "jobs":
        return request
    major, minor = Kubectl(request.options.namespace).version()
    if (major, minor) >= _INDEXED:
        return request
    print(f"[launch] Kubernetes {major}.{minor} has no Indexed Jobs: a Job per process", file=sys.stderr, flush=True)
    spec = replace(request.spec, options={**request.spec.options, "layout": "pods"})
    return make_manifests(spec, request.machine)
