"""The protocol of backends, and the backends that exist.

The command line takes every backend through the same steps::

    spec ──plan──► request ──render──► text of --dry-run
                      └────check, submit──► job ──wait──► exit code

| step | reads | does |
|---|---|---|
| ``plan`` | job spec, machine | pure: exact processes and environment, scripts or manifests |
| ``render`` | request | pure: all of it as text, the key masked, as in the golden files of the tests |
| ``check`` | request | looks for what would make the start fail, changes nothing |
| ``submit`` | request | makes the key, starts the job or gives it to the engine |
| ``wait`` | | shows output, returns the exit code of the first failure |

**How a process finds the scheduler.** Two ways, depending on who starts the processes.

1. *Our agents start them*: ssh, mpi, slurm, Grid Engine, Ray, YARN. The engine starts one agent (``paceline agent``)
   per host, like a remote shell. The launcher, which may itself run inside an allocation, starts the scheduler through
   its agent, learns its address, and then sends each process its environment, key and address included, over the
   agent's stdin. An agent whose stdin ends kills its processes. Such a backend only knows the command line that runs
   an agent on a host (:mod:`paceline.launch.remote`).
2. *The engine starts them*: Kubernetes. The scheduler's address is known beforehand (a Service, a pod's
   name, the first actor's address): it binds ``PACELINE_SCHEDULER=tcp://0.0.0.0:PORT`` and the others get
   ``PACELINE_SCHEDULER=tcp://NAME:PORT``; a name may resolve late, members try until ``start_timeout_s``. The plan is
   made with ``alone=True``; :meth:`ProcessSpec.environment <paceline.launch.ProcessSpec.environment>` fills the late
   values in. The key is ``PACELINE_JOB_KEY``, from the engine's own secret store or a file of mode 0600. ``READY_FD``
   and ``ENDED_FD`` are left out; then the engine's policy decides about failures.

Either way neither key nor user's variables are ever words of a command line, and no log has them.

**Third parties** register a class without arguments (:mod:`paceline.extensions`).
"""

from __future__ import annotations

import typing
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, cast

from paceline import extensions
from paceline.launch.job_spec import JobSpec
from paceline.launch.planner import Machine
from paceline.naming import suggestion

#: Backend by name: the module and class that implement it, imported when asked for.
BACKENDS: dict[str, str] = {
    "local": "paceline.launch.local:LocalBackend",
    "ssh": "paceline.launch.ssh:SshBackend",
    "mpi": "paceline.launch.engines.mpi:MpiBackend",
    "slurm": "paceline.launch.engines.slurm:SlurmBackend",
    "sge": "paceline.launch.engines.sge:SgeBackend",
    "k8s": "paceline.launch.engines.k8s.kubernetes:KubernetesBackend",
    "ray": "paceline.launch.engines.ray_cluster.ray_backend:RayBackend",
    "yarn": "paceline.launch.engines.yarn.yarn_backend:YarnBackend",
}

R = TypeVar("R")
T = TypeVar("T")


class Job(Protocol):
    """A job that was submitted."""

    id: str
    """Name by which the engine knows it."""

    @abstractmethod
    def wait(self) -> int:
        """Show the job's output until it ends; return its exit code. What we supervise ourselves runs meanwhile.

        Raises:
            paceline.errors.LaunchError: the job could not be started, or the engine lost it.
        """

    def cancel(self) -> None:
        """End the job and all its processes. Idempotent; also allowed after the job's end.

        A job that this process supervises ends with :meth:`wait`, and this does nothing.
        """
        return


class Backend(Protocol[R]):
    """A way to run a job. ``R`` is its form of a job spec.

    A class may have an attribute ``reads``: the keys of worker groups that it reads, besides those that all do (count,
    variables, words, weight, interface), and ``sync``, if it copies the launcher's directory. Others are then refused
    (:func:`check_unread`).
    """

    @abstractmethod
    def plan(self, spec: JobSpec, machine: Machine) -> R:
        """Turn a job spec into what will be run. Pure.

        Raises:
            ValueError: the spec does not fit this backend; the message says what would.
        """

    @abstractmethod
    def render(self, request: R) -> str:
        """Return the request as text, secrets masked."""

    @abstractmethod
    def check(self, request: R) -> None:
        """Check that the request can run. Starts nothing.

        Raises:
            paceline.errors.LaunchError: it cannot; the message says why and what to do.
        """

    @abstractmethod
    def submit(self, request: R) -> Job:
        """Start the job, after a call of :meth:`check`.

        Raises:
            paceline.errors.LaunchError: it could not be started.
        """


def names() -> list[str]:
    """Return the names of all backends, those of third parties included."""
    return sorted({*BACKENDS, *extensions.names("launcher")})


def backend(name: str) -> Backend[Any]:
    """Return the backend of a name.

    Raises:
        ValueError: unknown name, for which the message suggests one; or its class raises.
    """
    found = extensions.load(BACKENDS[name]) if name in BACKENDS else extensions.find("launcher", name, BACKENDS)
    return cast("Backend[Any]", extensions.made(f"launcher {name!r}", found))


def check_unread(name: str, spec: JobSpec) -> None:
    """Refuse parts of a job that a launcher does not read, as far as it names the parts that it reads.

    Raises:
        ValueError: a group has such a key, or a directory is to be copied; the message says which launchers read it.
    """
    if spec.sync and not _reads(name, "sync"):
        raise ValueError(
            f"launcher {name!r} does not copy a directory: --sync-dst-dir is for launcher ssh, whose hosts -H names; "
            "elsewhere take one that the hosts share, or that their image has"
        )
    for group in spec.groups:
        given = {"hosts": group.hosts, "select": group.select, "slots": group.slots, **group.resources}
        for key, value in given.items():
            if value and not _reads(name, key):
                ones = ", ".join(other for other in BACKENDS if _reads(other, key))
                raise ValueError(f"group {group.name}: {key}= changes nothing with launcher {name!r}, but with {ones}")


def _reads(name: str, key: str) -> bool:
    return key in getattr(backend(name), "reads", (key,))


def typed_options(backend: str, form: type[T], given: Mapping[str, str]) -> T:
    """Return the options of a backend as a dataclass.

    Args:
        backend: its name, for messages.
        form: a dataclass; its fields, with hyphens, are the names. Each is a ``str``, ``int``, ``float``, or a tuple of
            ``str``, which is written with commas.
        given: the user's options.

    Raises:
        ValueError: an unknown name, or a value that cannot be.
    """
    types = {name.replace("_", "-"): kind for name, kind in typing.get_type_hints(form).items()}
    values: dict[str, Any] = {}
    for name, text in given.items():
        plain = name.replace("_", "-")
        if plain not in types:
            raise ValueError(f"launcher {backend!r} has no option {name!r}{suggestion(name, types)}")
        values[plain.replace("-", "_")] = _value(plain, types[plain], text)
    return form(**values)


def _value(name: str, kind: Any, text: str) -> Any:
    if kind not in (str, int, float):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"-o {name}={text} is not {'an integer' if kind is int else 'a number'}") from None
