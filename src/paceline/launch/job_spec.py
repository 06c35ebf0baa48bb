"""The job spec: the user's request. A command, how many processes, on which hosts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from paceline import config
from paceline.errors import ConfigError
from paceline.launch.host_list import LOCALHOST, Host
from paceline.launch.worker_groups import WorkerGroup

#: More are a slip of the fingers; a plan of them would take minutes.
MOST_PROCESSES = 65536

_OTHER_VERSION = "this is not a job of this version of paceline"


@dataclass(frozen=True)
class Graces:
    """How long each part of starting and ending a job may take, in seconds."""

    start_s: float = 60.0
    """Until the scheduler has reported its address."""
    survivors_s: float = 6.0
    """Until the others have exited by themselves after a failure or an interrupt; then they are terminated."""
    interrupt_s: float = 6.0
    """The same after an interrupt: for workers that save their state when they get SIGTERM."""
    idle_s: float = 300.0
    """How long a process may use no CPU time, once all workers have said goodbye."""
    leave_s: float = 10.0
    """How long a process may be stopped (SIGSTOP) then, and the scheduler silent after the last worker's exit."""
    terminate_s: float = 5.0
    """Between SIGTERM and SIGKILL."""
    kill_s: float = 5.0
    """Until the kernel has ended a killed process."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; every wait needs a deadline above 0 seconds")


@dataclass(frozen=True)
class JobSpec:
    """A job as the user describes it; :func:`paceline.launch.make_plan` turns it into processes.

    Raises:
        ValueError: no command, no worker, no host, a negative number of servers, too many processes, two groups of one
            name, a number of workers that is not that of the groups, or a variable without a name.
        paceline.errors.ConfigError: a setting does not exist or its text does not fit.
    """

    command: tuple[str, ...]
    """The command of every worker."""
    num_workers: int = 0
    """0 means as many as ``groups`` have."""
    num_servers: int | None = None
    """None means as many as workers, or with ``ddp`` one on each host; 0 starts workers only, for scripts that need no
    parameter server."""
    job_id: str = "job"
    hosts: tuple[Host, ...] = (Host(LOCALHOST),)
    """Where processes go, in turn. Engines that allocate hosts themselves do not read it."""
    groups: tuple[WorkerGroup, ...] = ()
    """Worker groups; empty: all workers are alike."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for every process, weaker than ``settings``."""
    env_worker: Mapping[str, str] = field(default_factory=dict)
    """Variables for workers, stronger than ``env``."""
    env_server: Mapping[str, str] = field(default_factory=dict)
    """Variables for servers and the scheduler, stronger than ``env``."""
    directory: str = ""
    """Where processes run on other hosts; empty: where the launcher runs."""
    sync: bool = False
    """Copy the launcher's directory to ``directory`` on every host before the start."""
    log_dir: str = ""
    """Folder for a file per process with its output; empty: no files."""
    quiet: bool = False
    """Show the output of the workers, and failures; nothing about how the job does."""
    max_restarts: int = 0
    """How often the whole job is started again after a failure."""
    replace: int = 0
    """How often a worker that dies is started again, while the others go on."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The backend's options, by its own names: queue, namespace, image, time limit."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Fields of :class:`paceline.config.Settings` for every process, as text."""
    graces: Graces = field(default_factory=Graces)
    torchrun_env: bool = True
    """Give workers the variables of ``torch.distributed.init_process_group``, as torchrun does."""

    ddp: bool = False
    """Make ``init_process_group`` of the workers' scripts open the backend ``paceline``."""
    shares: str = "equal"
    """Samples of the workers of such scripts: ``equal``, or ``measured``, which is by their speed."""

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise ValueError(
                "there is no command to run; give it after --, as in: paceline launch -n 2 -- python train.py"
            )
        if self.groups:
            self._count_groups()
        if self.num_workers < 1:
            raise ValueError(f"number of workers is {self.num_workers}; a job has at least 1 worker")
        if self.servers < 0:
            raise ValueError(f"number of servers is {self.num_servers}; it is 0 or more")
        if self.num_workers + self.servers > MOST_PROCESSES:
            raise ValueError(
                f"{self.num_workers} workers and {self.servers} servers are more than the {MOST_PROCESSES} processes "
                "that one launcher can follow"
            )
        if not self.hosts:
            raise ValueError("there is no host to run on")
        if self.max_restarts < 0:
            raise ValueError(f"number of restarts is {self.max_restarts}; it is 0 or more")
        self._check_replace()
        for name in (*self.env, *self.env_worker, *self.env_server, *(name for one in self.groups for name in one.env)):
            if not name or "=" in name or "\0" in name:
                raise ValueError(f"{name!r} is not the name of an environment variable")
        _check_settings(self.settings)

    def _check_replace(self) -> None:
        if self.replace < 0:
            raise ValueError(f"number of replacements is {self.replace}; it is 0 or more")
        if self.replace and (self.ddp or not self.servers):
            raise ValueError(
                "workers can be replaced where servers hold the store: not with --ddp, nor without servers"
            )
        if self.replace and self.settings.get("on_worker_death") == "stop":
            raise ValueError("a job that stops when a worker dies replaces none: leave out one of the two options")

    def _count_groups(self) -> None:
        total = sum(group.count for group in self.groups)
        if len({group.name for group in self.groups}) < len(self.groups):
            raise ValueError("two groups have one name")
        if self.num_workers not in (0, total):
            raise ValueError(f"the groups have {total} workers together, and the job {self.num_workers}; leave out -n")
        object.__setattr__(self, "num_workers", total)

    @property
    def worker_groups(self) -> tuple[WorkerGroup, ...]:
        """The groups; one of all workers if the job has none."""
        return self.groups or (WorkerGroup("all", self.num_workers),)

    @property
    def servers(self) -> int:
        """How many servers the job has."""
        if self.num_servers is not None:
            return self.num_servers
        return min(self.num_workers, len(self.hosts)) if self.ddp else self.num_workers

    @property
    def insecure(self) -> bool:
        """Whether the job runs without a key."""
        return bool(config.parse("insecure", self.settings.get("insecure", "0"), "insecure"))


def _check_settings(settings: Mapping[str, str]) -> None:
    for name in settings:
        if name not in config.Settings.__dataclass_fields__:
            raise ConfigError(f"{name!r} is not a setting of paceline")
    values = {name: config.parse(name, text, name) for name, text in settings.items()}
    config.check(config.Settings(**values))


def to_json(spec: JobSpec) -> str:
    """Return a spec as JSON. It holds the user's variables: it must not be shown."""
    return json.dumps(asdict(spec))  # msgspec's own JSON refuses variables that are not UTF-8


def from_json(text: str) -> JobSpec:
    """Return the spec of :func:`to_json`.

    Raises:
        ValueError: it is none, or of another version.
    """
    import msgspec  # few launchers need it

    values = json.loads(text)
    try:
        spec = msgspec.convert(values, JobSpec)
    except msgspec.ValidationError as error:
        raise ValueError(f"{_OTHER_VERSION}: {error}") from error
    if json.loads(to_json(spec)) != values:
        raise ValueError(f"{_OTHER_VERSION}, its fields differ; install the same paceline on all hosts")
    return spec
