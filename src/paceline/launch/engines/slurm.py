"""The backend for Slurm: a batch job, or the allocation in which the launcher runs.

| the launcher runs | what happens |
|---|---|
| inside an allocation (salloc, sbatch) | one agent per node, started by srun; the launcher supervises |
| elsewhere | a batch script is submitted that runs the launcher inside its allocation; we follow its output |
"""

from __future__ import annotations

import math
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launch.backends import Job, typed_options
from paceline.launch.engines.batch import BatchJob
from paceline.launch.engines.programs import run_program
from paceline.launch.host_list import Host
from paceline.launch.job_spec import JobSpec, to_json
from paceline.launch.planner import Machine, make_plan
from paceline.launch.preflight import check_program
from paceline.launch.remote import RemoteJob, RemoteRequest, remote_request
from paceline.launch.worker_groups import WorkerGroup, amount, whole

#: Variable that brings the job spec into the allocation. It is no word of a command line.
SPEC_VARIABLE = "PACELINE_SPEC"

#: Options that become directives of the same name, for every component.
_DIRECTIVES = ("partition", "account", "qos", "time", "reservation", "constraint")

#: Variables by which a user's ``srun`` would change an agent's: its streams, cores, memory, devices, node and end.
#: Others of ``srun``'s count: prologs, containers, verbosity.
_OF_SRUN = re.compile(
    "SRUN_CPUS_PER_TASK|SRUN_EXPORT_ENV|SLURM_("
    "LABELIO|STDINMODE|STDOUTMODE|STDERRMODE|UNBUFFEREDIO|OPEN_MODE|EXPORT_ENV|SRUN_MULTI|CPU_BIND|CPUS_PER_TASK|"
    "CPUS_PER_GPU|CORE_SPEC|EXACT|EXCLUSIVE|HINT|OVERCOMMIT|THREADS|THREADS_PER_CORE|THREAD_SPEC|MEM_BIND|"
    "MEM_PER_CPU|MEM_PER_GPU|MEM_PER_NODE|MPI_TYPE|GPUS|GPUS_PER_TASK|GPUS_PER_SOCKET|GPU_BIND|GRES|GRES_FLAGS|"
    "STEP_GRES|RESV_PORTS|DISTRIBUTION|DIST_PLANESIZE|HOSTFILE|NNODES|NPROCS|NTASKS|NTASKS_PER_CORE|"
    "NTASKS_PER_GPU|NTASKS_PER_NODE|NTASKS_PER_SOCKET|NCORES_PER_SOCKET|NSOCKETS_PER_NODE|SPREAD_JOB|"
    "USE_MIN_NODES|REMOTE_CWD|WORKING_DIR|KILL_BAD_EXIT|WAIT|TIMELIMIT|SIGNAL|IMMEDIATE|TEST_EXEC"
    ")"
)

#: How the user reached the login node. An agent would take it for the way to its own node.
_OF_LOGIN = ("SSH_CONNECTION",)

#: Variables of ``sbatch`` that are not named like the directive which they would replace, or that are more than one.
_OF_SBATCH = {
    "time": ("SBATCH_TIMELIMIT",),
    "mem": ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"),
    "output": ("SBATCH_OUTPUT", "SBATCH_ERROR"),
}
#: Those that would make several jobs of one, wait for its end, or replace its environment.
_NEVER = ("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_GET_USER_ENV")

_PACKAGE = "slurm-client"
_RUNS = frozenset({"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "SIGNALING"})
_CODES = {"TIMEOUT": 124, "CANCELLED": 130, "OUT_OF_MEMORY": 137, "NODE_FAIL": 1, "PREEMPTED": 143}


@dataclass(frozen=True)
class SlurmOptions:
    """Options of the backend ``slurm``. The first ones are directives of the same name."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    """Limit, as in ``1:30:00``."""
    reservation: str = ""
    constraint: str = ""
    """Features of the nodes."""
    nodes: int = 0
    """How many nodes; 0: one per worker. ``slots=`` of a group says otherwise."""
    signal: int = 60
    """Seconds before the time limit at which the workers get SIGTERM."""
    output: str = ""
    """File for the job's output, where ``%j`` is the id of Slurm's job; empty: ``paceline-JOB.out``."""
    detach: str = "0"
    """1: do not wait for the job."""
    python: str = ""
    """Interpreter on the nodes; empty: the launcher's."""

    def __post_init__(self) -> None:
        if self.nodes < 0 or self.signal < 0:
            raise ValueError(f"nodes={self.nodes}, signal={self.signal}: neither is below 0")
        if "%" in self.output.replace("%j", ""):
            raise ValueError(
                f"output={self.output!r}: the launcher follows this file, and knows no sign of Slurm's but %j"
            )


def options_of(spec: JobSpec) -> SlurmOptions:
    """Return the options of a job.

    Raises:
        ValueError: one is unknown, or no number where one is needed.
    """
    return typed_options("slurm", SlurmOptions, spec.options)


@dataclass(frozen=True)
class SlurmBatch:
    """A batch job to submit."""

    script: str
    spec: JobSpec
    directory: str
    detach: bool = False


class SlurmBackend:
    """Submits a batch job, or runs a job inside an allocation."""

    reads = frozenset({"hosts", "slots", "select", "cpus", "gpus", "memory"})

    def plan(self, spec: JobSpec, machine: Machine) -> SlurmBatch | RemoteRequest:
        """Make a batch script; inside an allocation deal the processes to its nodes."""
        options = options_of(spec)
        if "SLURM_JOB_ID" in machine.environ:
            return self._inside(spec, machine, options)
        path = machine.environ.get("PYTHONPATH", "")
        script = batch_script(spec, options, options.python or machine.python, machine.directory, path)
        make_plan(spec, machine, alone=True)  # finds what cannot be, wherever processes go
        return SlurmBatch(script, spec, machine.directory, options.detach not in ("0", ""))

    def _inside(self, spec: JobSpec, machine: Machine, options: SlurmOptions) -> RemoteRequest:
        spec, components = place_on_nodes(spec, machine.environ)
        plan = make_plan(spec, machine)
        own = {name: value for name, value in sorted(machine.environ.items()) if _OF_SRUN.fullmatch(name)}
        gone = [*own, *(name for name in _OF_LOGIN if name in machine.environ)]
        request = remote_request(
            plan,
            machine,
            options.python,
            lambda host, script: [*srun_command(host, components[host.name], gone), *script],
            SPEC_VARIABLE,
        )
        return replace(request, environ={**own, **request.environ})

    def render(self, request: SlurmBatch | RemoteRequest) -> str:
        """Return the batch script, or the processes and the commands that reach their nodes."""
        return request.script if isinstance(request, SlurmBatch) else request.text

    def check(self, request: SlurmBatch | RemoteRequest) -> None:
        """Look for Slurm's programs."""
        check_program("sbatch" if isinstance(request, SlurmBatch) else "srun", _PACKAGE)

    def submit(self, request: SlurmBatch | RemoteRequest) -> Job:
        """Submit the batch job; inside an allocation return the job, which runs while its ``wait`` does."""
        if isinstance(request, RemoteRequest):
            return RemoteJob(request)
        words = [*_without(overriding(request.script)), "sbatch", "--parsable"]
        text = run_program(words, _PACKAGE, request.script, {SPEC_VARIABLE: to_json(request.spec)}, name="sbatch")
        job_id = text.strip().partition(";")[0]
        path = Path(request.directory, output(request.spec, options_of(request.spec)).replace("%j", job_id))
        print(f"[launch] Slurm job {job_id}, output in {path}", flush=True)
        return DetachedJob(job_id) if request.detach else SlurmJob(job_id, path)


class SlurmJob(BatchJob):
    """A batch job with its output at ``path``."""

    name, cancels, by_hand = "Slurm", "scancel", "scontrol show job"

    def __init__(self, job_id: str, path: Path) -> None:
        super().__init__(job_id, [(path, sys.stdout)], _PACKAGE)
        self._state, self._code = "PENDING", 0

    def runs(self) -> bool:
        """Ask Slurm for the job's state and its exit code."""
        text = run_program(["scontrol", "show", "job", "-o", self.id], _PACKAGE).partition("\n")[0]
        found = dict(re.findall(r"(\w+)=(\S*)", text))
        if not found.keys() >= {"JobState", "ExitCode"}:
            raise LaunchError(f"scontrol says nothing of the state of job {self.id}: {text!r}")
        code, _, signum = found["ExitCode"].partition(":")
        self._state, self._code = found["JobState"], int(code) or (128 + int(signum) if int(signum) else 0)
        return self._state in _RUNS

    def code(self) -> int:
        """Return the job's exit code; that of its state where the job did not end by itself."""
        if self._state in ("COMPLETED", "FAILED"):
            return self._code
        print(f"[launch] Slurm job {self.id} ended: {self._state}", flush=True)
        return self._code or _CODES.get(self._state, 1)

    def pass_on(self, signum: int) -> None:
        """Have Slurm signal the launcher inside, which passes it on to the workers that handle it."""
        name = signal.Signals(signum).name
        try:
            run_program(["scancel", "--batch", f"--signal={name.removeprefix('SIG')}", self.id], _PACKAGE)
        except LaunchError as error:
            self.say(f"{name} did not reach Slurm job {self.id}: {error}")


class DetachedJob(Job):
    """A batch job that outlives the launcher, which does not wait."""

    def __init__(self, job_id: str) -> None:
        self.id = job_id

    def wait(self) -> int:
        """Return at once."""
        return 0


def place_on_nodes(spec: JobSpec, environ: Mapping[str, str]) -> tuple[JobSpec, dict[str, str]]:
    """Return the spec with the nodes of an allocation as hosts, and by node the component that it belongs to.

    Raises:
        ValueError: the allocation has not as many components as the job has groups.
    """
    components = int(environ.get("SLURM_HET_SIZE", "0"))
    if not components:
        nodes = expand_nodes(environ["SLURM_JOB_NODELIST"])
        groups = tuple(replace(group, hosts=_known(group.hosts, nodes)) for group in spec.groups)
        hosts = tuple(Host(node) for node in nodes)
        return replace(spec, hosts=hosts, groups=groups), dict.fromkeys(nodes, "")
    if components != len(spec.worker_groups):
        raise ValueError(f"the allocation has {components} components, and the job {len(spec.worker_groups)} groups")
    by_group = [expand_nodes(environ[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"]) for index in range(components)]
    groups = tuple(
        replace(group, hosts=tuple(map(Host, nodes))) for group, nodes in zip(spec.groups, by_group, strict=True)
    )
    of_node = {node: str(index) for index, nodes in enumerate(by_group) for node in nodes}
    return replace(spec, hosts=tuple(map(Host, of_node)), groups=groups), of_node


def expand_nodes(text: str) -> list[str]:
    """Return the nodes of a list in Slurm's form: ``h[1-3,7],gpu05``."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        match = re.fullmatch(r"([^\[\]]*)(?:\[([\d,-]+)\](.*))?", part)
        if match is None:
            raise ValueError(f"{part!r} is not a list of Slurm nodes")
        prefix, ranges, rest = match.groups()
        if ranges is None:
            found.append(prefix)
            continue
        for one in ranges.split(","):
            first, _, last = one.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            found += [name for n in numbers for name in expand_nodes(f"{prefix}{n:0{len(first)}d}{rest}")]
    return found


def srun_command(host: Host, component: str, without: Iterable[str] = ()) -> list[str]:
    """Return the words that run one process on a node of the allocation, beside others; variables do not count."""
    group = [f"--het-group={component}"] if component else []
    return [
        *_without(without),
        *("srun", *group, "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--cpu-bind=none"),
        *("--mem=0", "--unbuffered", "--kill-on-bad-exit=0", "--export=ALL"),
    ]


def _without(names: Iterable[str]) -> list[str]:
    """Return the words before a command that take variables away from it."""
    unset = [f"--unset={name}" for name in names]
    return ["env", *unset] if unset else []


def _known(hosts: tuple[Host, ...], nodes: list[str]) -> tuple[Host, ...]:
    for host in hosts:
        if host.name not in nodes:
            raise ValueError(f"host {host.name} is not part of the allocation, which has {', '.join(nodes)}")
    return hosts


def batch_script(spec: JobSpec, options: SlurmOptions, python: str, directory: str, pythonpath: str) -> str:
    """Return a script for sbatch: one component of a heterogeneous job per worker group, then our launcher.

    Slurm sends SIGTERM to the launcher ``signal`` seconds before the time limit; the launcher passes it on.

    Raises:
        ValueError: a request has a line feed, after which it would be a command of the script.
    """
    lines = [
        "#!/bin/sh",
        f"#SBATCH --job-name=paceline-{spec.job_id}",
        f"#SBATCH --output={_word(output(spec, options))}",
    ]
    lines += [f"#SBATCH --chdir={_word(directory)}", "#SBATCH --export=ALL"]
    lines += [f"#SBATCH --signal=B:TERM@{options.signal}"]
    for index, group in enumerate(spec.worker_groups):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [f"#SBATCH {directive}" for directive in directives(group, options)]
    broken = next((line for line in lines if not line.isprintable()), None)
    if broken is not None:
        raise ValueError(f"{broken!r}: a request to Slurm has no control characters, line feeds neither")
    lines += [f"export PYTHONPATH={shlex.quote(pythonpath)}"] if pythonpath else []
    lines.append(f"exec {shlex.quote(python)} -P -m paceline run")
    return "\n".join(lines) + "\n"


def overriding(script: str) -> list[str]:
    """Return the variables of ``sbatch`` that would override a batch script: to Slurm they count more than it."""
    given = dict.fromkeys(re.findall(r"^#SBATCH --([\w-]+)", script, re.MULTILINE))
    own = [_OF_SBATCH.get(name, (f"SBATCH_{name.upper().replace('-', '_')}",)) for name in given]
    return [*(name for names in own for name in names), *_NEVER]


def _word(text: str) -> str:
    """Return a text as one word of a directive: blanks and signs need quotes there, as in a shell."""
    if re.fullmatch(r"[\w@%+=:,./*-]*", text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def output(spec: JobSpec, options: SlurmOptions) -> str:
    """Return the file that takes the job's output, in Slurm's pattern."""
    return options.output or f"paceline-{spec.job_id}.out"


def directives(group: WorkerGroup, options: SlurmOptions) -> Iterator[str]:
    """Yield a group's requests.

    Raises:
        ValueError: a label means nothing to Slurm, or an amount is none.
    """
    nodes, tasks = _shape(group, options)
    yield f"--nodes={nodes}"
    yield f"--ntasks-per-node={tasks}"
    for name in _DIRECTIVES:
        value = group.select.get(name, getattr(options, name))
        if value:
            yield f"--{name}={_word(value)}"
    for name in group.select:
        if name not in _DIRECTIVES:
            known = ", ".join(_DIRECTIVES)
            raise ValueError(f"group {group.name}: select={name} means nothing to Slurm; it has {known}")
    if group.hosts:
        yield f"--nodelist={','.join(host.name for host in group.hosts)}"
    if "cpus" in group.resources:
        yield f"--cpus-per-task={whole('cpus', group.resources['cpus'])}"
    if "gpus" in group.resources:
        yield f"--gpus-per-node={whole('gpus', group.resources['gpus']) * tasks}"
    if "memory" in group.resources:
        yield f"--mem={math.ceil(amount('memory', group.resources['memory'], 2**20) * tasks / 2**20)}"


def _shape(group: WorkerGroup, options: SlurmOptions) -> tuple[int, int]:
    if group.slots is not None:
        tasks = min(group.slots, group.count)
        return math.ceil(group.count / tasks), tasks
    nodes = min(len(group.hosts) or options.nodes or group.count, group.count)
    return nodes, math.ceil(group.count / nodes)
