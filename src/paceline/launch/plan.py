"""The job plan: the processes of a job. Pure, printable, the same for every backend."""

from __future__ import annotations

import enum
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from paceline.config import variable
from paceline.launch.host_list import LOCALHOST, Host
from paceline.launch.job_spec import Graces, JobSpec
from paceline.launch.worker_groups import WorkerGroup

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)

#: Secrets in URLs: a password, a token in its place, and parameters with the name of a secret.
_IN_URLS = re.compile(
    r"""(?P<user>://[^\s/?#"':@]*:)[^\s/?#"']*(?=@) | (?P<scheme>https?://)[^\s/?#"':@]+(?=@)
    | (?P<parameter>[?&][\w.-]*(?:KEY|TOKEN|SECRET|PASSW|CREDENTIAL|SIGNATURE)[\w.-]*=)[^\s&#"']+""",
    re.IGNORECASE | re.VERBOSE,
)


class Late(enum.Enum):
    """A value that a backend learns only while it starts the job. The member's value is how it is printed."""

    JOB_KEY = "***"
    BIND = "<where the scheduler binds>"
    READY_FD = "<pipe on which the scheduler says where it listens, and which process failed first>"
    ENDED_FD = "<pipe on which the launcher says which processes have ended>"
    SCHEDULER = "<where the scheduler listens>"
    SCHEDULER_HOST = "<host of the scheduler>"
    SCHEDULER_PORT = "<port of the scheduler>"
    MASTER_ADDR = "<address of worker 0's host>"
    MASTER_PORT = "<free port>"
    RESTART = "<how often the job was started again>"
    PAGE_TOKEN = "<secret of the page>"


Value: TypeAlias = str | Late


def address_parts(scheduler: str | None) -> dict[Late, str]:
    """Return the late values that follow from the scheduler's address, ``tcp://host:port``."""
    if scheduler is None:
        return {}
    host, _, port = scheduler.removeprefix("tcp://").rpartition(":")
    return {Late.SCHEDULER: scheduler, Late.SCHEDULER_HOST: host.strip("[]"), Late.SCHEDULER_PORT: port}


class ProcessName(NamedTuple):
    """Identity of a process: its role and its launch index within the role."""

    role: str
    rank: int

    def __str__(self) -> str:
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"


SCHEDULER = ProcessName("scheduler", 0)


@dataclass(frozen=True)
class ProcessSpec:
    """One process: its identity, its command, and variables on top of the backend's own environment."""

    role: str
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, Value] = field(default_factory=dict)
    host: str = LOCALHOST
    """Name of one of the plan's hosts."""
    group: str = ""
    """Worker group, of workers."""

    @property
    def member(self) -> ProcessName:
        """Identity of the process."""
        return ProcessName(self.role, self.rank)

    def environment(self, known: Mapping[Late, str]) -> dict[str, str]:
        """Return ``env`` with every late value filled in.

        Raises:
            KeyError: a late value is not known yet.
        """
        return {name: known[value] if isinstance(value, Late) else value for name, value in self.env.items()}


@dataclass(frozen=True)
class JobPlan:
    """The processes of a job in the order they start: scheduler (at most one), servers, workers.

    Raises:
        ValueError: no worker, two schedulers, or two processes with one role and rank.
    """

    processes: tuple[ProcessSpec, ...]
    job_id: str = "job"
    graces: Graces = field(default_factory=Graces)
    notes: tuple[str, ...] = ()
    """Choices of the planner that the user may want to change."""
    hosts: tuple[Host, ...] = (Host(LOCALHOST),)
    """Hosts that have a process."""
    directory: str = ""
    """Where processes run; empty: where the launcher runs."""
    log_dir: str = ""
    """Folder for a file per process with its output; empty: no files."""
    max_restarts: int = 0
    """How often the whole job is started again after a failure."""
    quiet: bool = False
    """Show the output of the processes, and failures; nothing about how the job does."""
    replace: int = 0
    """How often a worker that dies is started again, while the others go on."""

    def __post_init__(self) -> None:
        roles = Counter(process.role for process in self.processes)
        if not roles["worker"]:
            raise ValueError("a plan has at least one worker")
        if roles["scheduler"] > 1:
            raise ValueError(f"a plan has one scheduler, not {roles['scheduler']}")
        for member, count in Counter(process.member for process in self.processes).items():
            if count > 1:
                raise ValueError(f"{member} is in the plan {count} times")

    def __iter__(self) -> Iterator[ProcessSpec]:
        return iter(self.processes)

    @property
    def scheduler(self) -> ProcessSpec | None:
        """The scheduler's process, if the job has one."""
        return next((process for process in self if process.role == "scheduler"), None)

    def may_go_on(self, environ: Mapping[str, str]) -> bool:
        """Tell whether the job may go on when a worker dies: its scheduler, which inherits ``environ``, decides."""
        return self.scheduler is not None and self.setting("on_worker_death", environ) != "stop"

    def setting(self, name: str, environ: Mapping[str, str]) -> str:
        """Return the text of a setting of the whole job, whose processes inherit ``environ``."""
        given = self.processes[0].env.get(variable(name))
        return str(given) if given else environ.get(variable(name), "")

    @property
    def needs_backend(self) -> bool:
        """Whether the workers must join: ``--ddp`` makes several scripts one job."""
        workers = [process for process in self if process.role == "worker"]
        return len(workers) > 1 and all("PACELINE_DDP" in worker.env for worker in workers)

    def needs(self, value: Late) -> bool:
        """Tell whether any process needs a late value."""
        return any(value in process.env.values() for process in self)


@dataclass(frozen=True)
class JobPart:
    """Processes that differ in their ranks only: the scheduler, the servers, or a worker group."""

    name: str
    role: str
    processes: tuple[ProcessSpec, ...]
    group: WorkerGroup | None = None

    @property
    def first_rank(self) -> int:
        """The lowest rank; the others follow it."""
        return self.processes[0].rank


def job_parts(spec: JobSpec, plan: JobPlan) -> list[JobPart]:
    """Return scheduler, servers, and the worker groups; without groups all workers are the part ``worker``.

    The plan was made with ``alone=True``.
    """
    by_role = {role: tuple(process for process in plan if process.role == role) for role in ("scheduler", "server")}
    parts = [JobPart(role, role, processes) for role, processes in by_role.items() if processes]
    for group in spec.worker_groups:
        processes = tuple(process for process in plan if process.role == "worker" and process.group == group.name)
        parts.append(JobPart(f"worker-{group.name}" if spec.groups else "worker", "worker", processes, group))
    return parts


# ---- the plan as text ------------------------------------------------------------------------------------------------


def describe(plan: JobPlan, commands: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> str:
    """Return the plan as text: one block per process. Secrets are masked, other late values are described.

    Before them come the commands that the launcher runs, and the variables that processes on other hosts inherit.
    """
    blocks = [_summary(plan)]
    if commands:
        blocks.append("\n".join(["the launcher runs", *(f"  {_without_secrets(command)}" for command in commands)]))
    if environ:
        blocks.append("\n".join(["every process inherits", *_variables(environ)]))
    blocks += [*(_block(process) for process in plan), *(f"note: {note}" for note in plan.notes)]
    return "\n\n".join(blocks) + "\n"


def _summary(plan: JobPlan) -> str:
    counts = Counter(process.role for process in plan)
    return f"job {plan.job_id}: " + ", ".join(f"{n} {role}{'s' if n > 1 else ''}" for role, n in counts.items())


def _block(process: ProcessSpec) -> str:
    group = f", group {process.group}" if process.group not in ("", "all") else ""
    head = f"{process.member} on {process.host}{group}"
    return "\n".join([head, f"  {_without_secrets(shlex.join(process.argv))}", *_variables(process.env)])


def _variables(env: Mapping[str, Value]) -> list[str]:
    return [f"    {name}={_text(name, value)}" for name, value in env.items()]


def _text(name: str, value: Value) -> str:
    if isinstance(value, Late):
        return value.value
    return "***" if _SECRET.search(name) else _without_secrets(shlex.quote(value))


def _without_secrets(text: str) -> str:
    """Return a text with the secrets in its URLs masked."""
    return _IN_URLS.sub(lambda found: f"{found['user'] or found['scheme'] or found['parameter']}***", text)
