"""Follow a job on Kubernetes: what its pods print, and how it ends.

| phase | what happens | ends when |
|---|---|---|
| waiting, running | pods are listed every ``_POLL_S``; their output is shown | all workers are done, or a failure |
| failing | the others may report, for ``survivors_s`` | no pod runs any more, or the time is over |
| deleting | everything with the job's label is deleted | kubectl says it is gone |

JobSet and Kubeflow judge themselves whether the job is over, and start it again. In the other layouts a failed pod, or
the last worker's success, decides here, and this module deletes and creates the objects again.

If the launcher is killed, a process of it that is left deletes the job (:class:`~paceline.launch.canceller.Canceller`).
If its machine is lost, the pods run to their own end; a JobSet that has ended is then deleted after ``TTL_S``.

A pod that cannot start (its image does not exist) is a failure after ``start_s``; a pod that waits for a free node is
not, because a queue may be long. If the cluster does not answer for ``start_s`` the job is given up, and the error says
how to delete it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from paceline.errors import LaunchError
from paceline.launch import runtime
from paceline.launch.canceller import Canceller
from paceline.launch.k8s.kubectl import Kubectl
from paceline.launch.k8s.manifests import Manifests, make_manifests
from paceline.launch.k8s.state import Pod, first_failure, pods, verdict, workers_done
from paceline.launch.k8s.yaml_text import documents
from paceline.launch.supervise.console import OUT, Console
from paceline.launch.supervise.failure import Failure
from paceline.launch.supervise.report import failure_block
from paceline.launch.supervise.signals import SignalPipe
from paceline.net.security import new_job_key

_POLL_S = 1.0
#: How long kubectl waits until a job is gone. Its call may take longer, so that kubectl says what is left.
_DELETE_S, _DELETE_CALL_S = 120, 130
#: How long the last lines of a job may take to arrive.
_DRAIN_S = 3.0

#: By layout: the object that says how the job goes, if the engine decides; and the kinds to delete.
_JUDGES = {"jobset": "jobsets.jobset.x-k8s.io", "trainer": "trainjobs.trainer.kubeflow.org"}
_KINDS = {
    "jobset": "jobsets.jobset.x-k8s.io,secrets",
    "trainer": "trainjobs.trainer.kubeflow.org,clustertrainingruntimes.trainer.kubeflow.org,secrets",
    "jobs": "jobs,services,secrets",
    "pods": "jobs,services,secrets",
}


class KubernetesJob:
    """A job whose processes are pods.

    Args:
        manifests: what to create.
    """

    def __init__(self, manifests: Manifests) -> None:
        self.id = manifests.name
        self._manifests = manifests
        self._graces = manifests.spec.graces
        self._kubectl = Kubectl(manifests.options.namespace)
        self._label = f"app.kubernetes.io/instance={manifests.name}"
        self._judge = _JUDGES.get(manifests.options.layout)
        self._key = new_job_key() if manifests.has_key else ""
        self._restarts = 0
        self._canceller = Canceller(self._kubectl.words(self._delete()))

    def create(self) -> None:
        """Create the Secret and all objects.

        Raises:
            LaunchError: the cluster refused one; what was created is deleted again.
        """
        try:
            if self._key:
                self._kubectl.run(["create", "-f", "-"], documents([self._manifests.secret(self._key)]))
            self._kubectl.run(["apply", "-f", "-"], documents(self._manifests.objects))
        except BaseException:  # also Ctrl-C
            self.cancel()
            raise

    def wait(self) -> int:
        """Show what the pods print until the job ends; return its exit code. Then nothing of it is left.

        Raises:
            LaunchError: the cluster does not answer any more, or the objects cannot be deleted.
        """
        self._console = Console()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._recorded())
            selector = stack.enter_context(selectors.DefaultSelector())
            signals = stack.enter_context(SignalPipe())
            selector.register(signals.fd, selectors.EVENT_READ)
            self._followers = Followers(selector, self._console)
            stack.callback(self.cancel)
            stack.callback(self._followers.close)
            return self._follow(signals)

    def _recorded(self) -> contextlib.AbstractContextManager[None]:
        spec = self._manifests.spec
        return runtime.recorded(spec.job_id, shlex.join(spec.command), spec.num_workers, spec.servers)

    def cancel(self) -> None:
        """Delete everything of the job and wait until it is gone.

        Raises:
            LaunchError: kubectl failed; the message says what to try.
        """
        self._remove()
        self._canceller.release()

    def _remove(self) -> None:
        try:
            self._kubectl.run(self._delete(), limit_s=_DELETE_CALL_S)
            self._kubectl.run(["delete", "pods", *self._flags()], limit_s=_DELETE_CALL_S)
        except LaunchError as error:
            raise LaunchError(f"{error}\nthe job may still run: kubectl delete all -l {self._label}") from error

    def _delete(self) -> list[str]:
        """Return the words for kubectl that delete everything of the job; pods go with what owns them."""
        return ["delete", _KINDS[self._manifests.options.layout], *self._flags(), "--cascade=foreground"]

    def _flags(self) -> list[str]:
        return ["--selector", self._label, "--ignore-not-found", "--timeout", f"{_DELETE_S}s"]

    def logs(self) -> Iterator[str]:
        """Give the lines that all pods have printed so far."""
        for pod in self._pods():
            if pod.has_started:
                for line in self._kubectl.run(["logs", f"pod/{pod.name}"]).splitlines():
                    yield f"[{pod.member}] {line}"

    def _pods(self) -> list[Pod]:
        return pods(self._kubectl.get(["pods", "--selector", self._label]))

    def _follow(self, signals: SignalPipe) -> int:
        self._began = time.monotonic()
        self._heard = self._began
        failure: Failure | None = None
        give_up = float("inf")
        while True:
            for signum in self._followers.read(_POLL_S, signals):
                self._console.say(f"{signal.Signals(signum).name}: deleting the job")
                return 128 + signum
            found = self._look()
            failure = self._judge_pods(found) or failure
            ended = self._verdict(found, failure)
            if ended:
                self._followers.drain(signals)
                return 0
            if ended is None:
                continue
            give_up = min(give_up, time.monotonic() + self._graces.survivors_s)
            if any(pod.has_started and pod.code is None for pod in found) and time.monotonic() < give_up:
                continue
            self._followers.drain(signals)
            if failure is None:
                raise LaunchError(f"{self.id} failed, and no pod says why: kubectl describe {self._judge} {self.id}")
            self._report(failure, found)
            if self._judge is not None or self._restarts >= self._manifests.spec.max_restarts:
                return failure.code
            self._restart()
            failure, give_up = None, float("inf")

    def _look(self) -> list[Pod]:
        """List the pods and follow the new ones; a cluster that does not answer has a deadline."""
        try:
            found = self._pods()
        except LaunchError as error:
            if time.monotonic() - self._heard > self._graces.start_s:
                raise
            self._console.say(str(error))
            return []
        self._heard = time.monotonic()
        for pod in found:
            if pod.has_started:
                self._followers.add(pod, self._kubectl)
        return found

    def _judge_pods(self, found: Sequence[Pod]) -> Failure | None:
        now = time.monotonic()
        first = first_failure(found)
        if first is not None:
            reason = f"{first.reason or 'failed'} on {first.node or 'no node'} (pod {first.name})"
            return Failure(first.member, first.code or 1, reason, now - self._began)
        stuck = next((pod for pod in found if pod.hopeless), None)
        if stuck is not None and now - self._began > self._graces.start_s:
            return Failure(stuck.member, 1, f"cannot start: {stuck.reason} (pod {stuck.name})", now - self._began)
        return None

    def _verdict(self, found: Sequence[Pod], failure: Failure | None) -> bool | None:
        """Return how the job ended, or None."""
        if self._judge is not None:
            try:
                return verdict(self._kubectl.get([self._judge, self.id]))
            except LaunchError as error:
                self._console.say(str(error))
                return None
        if failure is not None:
            return False
        return True if workers_done(found, self._manifests.spec.num_workers) else None

    def _report(self, failure: Failure, found: Sequence[Pod]) -> None:
        others = {
            pod.member: pod.code for pod in found if pod.code is not None and pod.member != failure.member and pod.code
        }
        self._console.block(failure_block(failure, self._console.tail(failure.member), others))

    def _restart(self) -> None:
        """Delete the objects and create them again.

        Raises:
            LaunchError: see :meth:`create`.
        """
        self._restarts += 1
        self._console.say(f"restart {self._restarts} of {self._manifests.spec.max_restarts}")
        self._followers.close()
        self._remove()
        old = self._manifests
        self._manifests = make_manifests(old.spec, old.machine, self._restarts)
        self.create()


class Followers:
    """The ``kubectl logs --follow`` of all pods.

    Args:
        selector: waits for them and for what else is registered.
        console: where the lines go.
    """

    def __init__(self, selector: selectors.BaseSelector, console: Console) -> None:
        self._selector, self._console = selector, console
        self._running: dict[int, tuple[Pod, subprocess.Popen[bytes]]] = {}
        self._seen: set[str] = set()

    def add(self, pod: Pod, kubectl: Kubectl) -> None:
        """Follow a pod that has started, once."""
        if pod.name in self._seen:
            return
        self._seen.add(pod.name)
        process = kubectl.follow(pod.name)
        assert process.stdout is not None
        fd = process.stdout.fileno()
        self._running[fd] = (pod, process)
        self._selector.register(fd, selectors.EVENT_READ)

    def read(self, timeout_s: float, signals: SignalPipe) -> list[int]:
        """Show what comes, for at most a time; return the signals that ended it.

        Every call of kubectl that ends wakes the selector by SIGCHLD, which means nothing here.
        """
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fd in self._running:
                    self._show(key.fd)
                elif found := signals.read():
                    return found
        return []

    def drain(self, signals: SignalPipe) -> None:
        """Show what is left of pods that have ended. Pods that still run end this after ``_DRAIN_S``."""
        until = time.monotonic() + _DRAIN_S
        while self._running and (left := until - time.monotonic()) > 0 and not self.read(min(left, 0.1), signals):
            pass

    def close(self) -> None:
        """End all, and follow pods of the same names anew."""
        self._seen.clear()
        for fd in list(self._running):
            self._end(fd)

    def _show(self, fd: int) -> None:
        pod, _ = self._running[fd]
        data = os.read(fd, 65536)
        if data:
            self._console.feed(pod.member, OUT, data)
        else:
            self._console.close(pod.member, OUT)
            self._end(fd)

    def _end(self, fd: int) -> None:
        _, process = self._running.pop(fd)
        self._selector.unregister(fd)
        process.kill()
        process.communicate()
