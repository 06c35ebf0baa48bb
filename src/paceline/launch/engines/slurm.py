"""The backend for Slurm: a batch job, or the allocation in which the launcher runs.

| the launcher runs | what happens |
|---|---|
| inside an allocation (salloc, sbatch) | one agent per node, started by srun; the launcher supervises |
| elsewhere | a batch script is submitted that runs the launcher inside its allocation; we follow its output |
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launch.canceller import Canceller
from paceline.launch.engines.slurm_script import SPEC_VARIABLE, batch_script, output
from paceline.launch.environment import OWNED
from paceline.launch.hosts import Host
from paceline.launch.options import backend_options
from paceline.launch.planner import Machine, make_plan
from paceline.launch.remote import RemoteJob, RemoteRequest, agent_script, forwarded
from paceline.launch.remote.explain import explain
from paceline.launch.render import describe
from paceline.launch.spec import JobSpec
from paceline.launch.spec_json import to_json
from paceline.launch.ssh import check_program

OPTIONS = {
    "partition": "of all groups that select none",
    "account": "to charge",
    "qos": "quality of service",
    "time": "limit, as in 1:30:00",
    "reservation": "to use",
    "constraint": "features of the nodes",
    "nodes": "how many nodes (default: one per worker; slots= of a group says otherwise)",
    "signal": "seconds before the time limit at which the workers get SIGTERM (default: 60)",
    "output": "file for the job's output (default: paceline-JOB.out; %j is the id of Slurm's job)",
    "detach": "1: do not wait for the job",
    "python": "interpreter on the nodes (default: the launcher's)",
}

_POLL_S = 0.5
_RUNS = frozenset({"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "SIGNALING"})
_CODES = {"TIMEOUT": 124, "CANCELLED": 130, "OUT_OF_MEMORY": 137, "NODE_FAIL": 1, "PREEMPTED": 143}


@dataclass(frozen=True)
class SlurmBatch:
    """A batch job to submit."""

    script: str
    spec: JobSpec
    directory: str
    detach: bool = False


class SlurmBackend:
    """Submits a batch job, or runs a job inside an allocation."""

    def plan(self, spec: JobSpec, machine: Machine) -> SlurmBatch | RemoteRequest:
        """Make a batch script; inside an allocation deal the processes to its nodes.

        Raises:
            ValueError: see :func:`~paceline.launch.make_plan`; or an option is wrong.
        """
        options = backend_options("slurm", OPTIONS, spec.options)
        if spec.sync:
            raise ValueError("launcher 'slurm' does not copy a directory: use one that the nodes share")
        if "SLURM_JOB_ID" in machine.environ:
            return self._inside(spec, machine, options)
        python, path = options.get("python", machine.python), machine.environ.get("PYTHONPATH", "")
        script = batch_script(spec, python, machine.directory, path)
        make_plan(replace(spec, hosts=(Host("node"),)), machine)  # finds what cannot be
        return SlurmBatch(script, spec, machine.directory, options.get("detach", "0") not in ("0", ""))

    def _inside(self, spec: JobSpec, machine: Machine, options: Mapping[str, str]) -> RemoteRequest:
        spec, components = place_on_nodes(spec, machine.environ)
        plan = make_plan(spec, machine)
        environ = forwarded(machine.environ, OWNED | {SPEC_VARIABLE})
        python = options.get("python", "")
        script = agent_script(python, machine.python, plan.directory, environ.get("PYTHONPATH", ""))

        def command(host: Host) -> list[str]:
            return [*srun_command(host, components[host.name]), *script]

        return RemoteRequest(plan, machine.python, command, environ)

    def render(self, request: SlurmBatch | RemoteRequest) -> str:
        """Return the batch script, or the processes and the commands that reach their nodes."""
        if isinstance(request, SlurmBatch):
            return request.script
        commands = [shlex.join(request.command(host)) for host in request.plan.hosts]
        return describe(request.plan, commands, request.environ)

    def check(self, request: SlurmBatch | RemoteRequest) -> None:
        """Look for Slurm's programs.

        Raises:
            LaunchError: they are missing.
        """
        check_program("sbatch" if isinstance(request, SlurmBatch) else "srun", "slurm-client")

    def submit(self, request: SlurmBatch | RemoteRequest) -> SlurmJob | RemoteJob:
        """Submit the batch job; inside an allocation return the job, which runs while its ``wait`` does.

        Raises:
            LaunchError: Slurm refuses the job.
        """
        self.check(request)
        if isinstance(request, RemoteRequest):
            return RemoteJob(request, explain)
        text = slurm(["sbatch", "--parsable"], request.script, {SPEC_VARIABLE: to_json(request.spec)})
        job_id = text.strip().partition(";")[0]
        path = Path(request.directory, output(request.spec).replace("%j", job_id))
        return SlurmJob(job_id, path, request.detach)


class SlurmJob:
    """A batch job.

    Args:
        job_id: Slurm's.
        path: of its output.
        detach: :meth:`wait` returns at once, and the job outlives the launcher.
    """

    def __init__(self, job_id: str, path: Path, detach: bool = False) -> None:
        self.id = job_id
        self._path, self._detach = path, detach
        self._canceller = None if detach else Canceller(["scancel", job_id])
        self._shown = 0

    def wait(self, show: Callable[[str], None] = lambda text: print(text, end="", flush=True)) -> int:
        """Show the output until the job ends; return its exit code.

        Raises:
            LaunchError: Slurm does not know the job any more.
        """
        show(f"[launch] Slurm job {self.id}, output in {self._path}\n")
        if self._detach:
            return 0
        state, code = self._state()
        while state in _RUNS:
            time.sleep(_POLL_S)
            show(self._more())
            state, code = self._state()
        show(self._more())
        self._release()
        if state not in ("COMPLETED", "FAILED"):
            show(f"[launch] Slurm job {self.id} ended: {state}\n")
            return code or _CODES.get(state, 1)
        return code

    def cancel(self) -> None:
        """Cancel the job and wait until it is gone."""
        slurm(["scancel", self.id])
        while self._state()[0] in _RUNS:
            time.sleep(_POLL_S)
        self._release()

    def logs(self) -> Iterator[str]:
        """Give the lines that the job has printed so far."""
        return iter(self._path.read_text(errors="replace").splitlines() if self._path.exists() else ())

    def _release(self) -> None:
        if self._canceller is not None:
            self._canceller.release()

    def _more(self) -> str:
        """Return what the job has printed since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._shown)
                data = file.read()
        except FileNotFoundError:
            return ""
        data = data[: data.rfind(b"\n") + 1]
        self._shown += len(data)
        return data.decode(errors="replace")

    def _state(self) -> tuple[str, int]:
        """Return Slurm's word for the job's state, and its exit code."""
        text = slurm(["scontrol", "show", "job", "-o", self.id]).splitlines()[0]
        found = dict(re.findall(r"(\w+)=(\S*)", text))
        code, _, signum = found["ExitCode"].partition(":")
        return found["JobState"], int(code) or (128 + int(signum) if int(signum) else 0)


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
    """Return the nodes of a list in Slurm's form: ``h[1-3,7],gpu05``.

    Raises:
        ValueError: it has another form.
    """
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


def srun_command(host: Host, component: str) -> list[str]:
    """Return the words that run one process on a node of the allocation, beside others."""
    group = [f"--het-group={component}"] if component else []
    return [
        *("srun", *group, "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--cpu-bind=none"),
        *("--mem=0", "--unbuffered", "--kill-on-bad-exit=0", "--export=ALL"),
    ]


def slurm(argv: list[str], text: str = "", environ: Mapping[str, str] | None = None) -> str:
    """Run a program of Slurm and return what it prints.

    Raises:
        LaunchError: it failed; with what it said.
    """
    done = subprocess.run(
        argv, input=text, capture_output=True, text=True, check=False, env=os.environ | dict(environ or {})
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise LaunchError(f"{argv[0]} refused: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def _known(hosts: tuple[Host, ...], nodes: list[str]) -> tuple[Host, ...]:
    for host in hosts:
        if host.name not in nodes:
            raise ValueError(f"host {host.name} is not part of the allocation, which has {', '.join(nodes)}")
    return hosts
