"""The backend that runs a job as one job of Grid Engine, with a parallel environment; inside, an agent per host.

| where | what |
|---|---|
| the user's shell | writes a folder with the spec, submits a script with ``qsub``, shows its output |
| first host of the job | the script runs ``python -m paceline.launch.engines.sge FOLDER``, which supervises |
| each host of the job | an agent, started with ``qrsh -inherit``, so that Grid Engine ends it with the job |
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from paceline.errors import LaunchError, PacelineError
from paceline.host.text_files import write_text
from paceline.launch.backends import Job, typed_options
from paceline.launch.engines.batch import BatchJob
from paceline.launch.engines.programs import run_program
from paceline.launch.host_list import Host
from paceline.launch.job_spec import JobSpec, from_json, to_json
from paceline.launch.plan import describe
from paceline.launch.planner import Machine, make_plan
from paceline.launch.preflight import check_program
from paceline.launch.remote import RemoteJob, forwarded, remote_request
from paceline.launch.remote.agent_link import AgentLink

_SPEC, _AGENT, _CODE = "spec.json", "agent", "code"
_PLAIN = re.compile(r"[\w@%+=:,./*-]+")
_PACKAGE = "gridengine-client, or run this on a submit host of Grid Engine"


@dataclass(frozen=True)
class SgeOptions:
    """Options of the backend ``sge``."""

    pe: str = "paceline"
    """Parallel environment with ``control_slaves TRUE``."""
    queue: str = ""
    """Queues, separated by commas; empty: any."""
    resources: str = ""
    """Resource request of a slot, as ``qsub -l`` has it: ``h_vmem=4G,gpu=1``."""
    time: str = ""
    """Limit of the run time: ``HH:MM:SS`` or seconds."""
    project: str = ""
    """Project to charge, as ``qsub -P`` has it."""
    python: str = ""
    """Interpreter on the hosts; empty: the launcher's."""

    def __post_init__(self) -> None:
        for name, text in asdict(self).items():
            if text and not _PLAIN.fullmatch(text):
                raise ValueError(f"option {name}={text!r}: no blanks or quotes are possible there")


@dataclass(frozen=True)
class SgeRequest:
    """A job on Grid Engine."""

    spec: JobSpec
    machine: Machine
    script: str
    folder: str
    pe: str
    environ: Mapping[str, str]
    inside: bool
    """The launcher runs in a job with a parallel environment already."""


class SgeBackend:
    """Submits a script, or starts agents in the job that the launcher runs in."""

    reads = frozenset({"slots"})

    def plan(self, spec: JobSpec, machine: Machine) -> SgeRequest:
        """Write the script."""
        options = options_of(spec)
        directory = spec.directory or machine.directory
        folder = os.path.join(directory, f".paceline-{spec.job_id}")
        if any(one.isspace() for one in folder):
            raise ValueError(f"Grid Engine cannot run in a directory with blanks in its name: {directory!r}")
        python = options.python or machine.python
        there = replace(machine, python=python, cores={}, directory=directory)
        environ = forwarded(machine.environ)
        script = job_script(spec, options, python, folder, directory, environ.get("PYTHONPATH", ""))
        inside = "PE_HOSTFILE" in machine.environ
        placed = replace(spec, directory=directory, options={})
        return SgeRequest(placed, there, script, folder, options.pe, environ, inside)

    def render(self, request: SgeRequest) -> str:
        """Return the script and the processes; Grid Engine chooses their hosts."""
        plan = make_plan(request.spec, request.machine, alone=True)
        return f"{request.script}\n{describe(plan, environ=request.environ)}"

    def check(self, request: SgeRequest) -> None:
        """Look for the programs and the parallel environment."""
        check_program("qrsh" if request.inside else "qsub", _PACKAGE)
        if not request.inside:
            there = run_program(["qconf", "-spl"], _PACKAGE).split()
            if request.pe not in there:
                raise LaunchError(
                    f"Grid Engine has no parallel environment {request.pe!r}; it has {', '.join(there) or 'none'}: "
                    "-o pe=NAME"
                )

    def submit(self, request: SgeRequest) -> Job:
        """Submit the script; inside a job, return the job that starts agents when it is waited for."""
        return InsideJob(request) if request.inside else SgeJob(request)


class InsideJob(Job):
    """A job in the slots of a Grid Engine job of the user's own; it runs while :meth:`wait` does."""

    def __init__(self, request: SgeRequest) -> None:
        self._request = request
        self.id = request.spec.job_id

    def wait(self) -> int:
        """Run the job and return its exit code."""
        _heed_notices()
        folder = _made_folder(self._request)
        try:
            return _run(self._request.spec, self._request.machine, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class SgeJob(BatchJob):
    """A job of Grid Engine."""

    name, cancels, by_hand = "Grid Engine", "qdel", "qdel -f"

    def __init__(self, request: SgeRequest) -> None:
        self._folder = _made_folder(request)
        try:
            text = json.dumps([to_json(request.spec), dict(request.environ), request.machine.python])
            write_text(self._folder / _SPEC, text, 0o600)  # it holds the user's variables
            script = self._folder / "script"
            script.write_text(request.script)
            job_id = run_program(["qsub", "-terse", str(script)], _PACKAGE).strip()
            super().__init__(job_id, [(self._folder / "out", sys.stdout), (self._folder / "err", sys.stderr)], _PACKAGE)
        except BaseException as error:  # also Ctrl-C
            shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise LaunchError(f"the folder of the job cannot be written to: {error}") from error
            raise
        self.say(f"Grid Engine job {self.id}")

    def runs(self) -> bool:
        """Ask Grid Engine whether it knows the job."""
        try:
            run_program(["qstat", "-j", self.id], _PACKAGE)
        except LaunchError as error:
            if "do not exist" in str(error):
                return False
            raise
        return True

    def code(self) -> int:
        """Return the job's exit code that the launcher inside has left; 1 if Grid Engine ended it."""
        try:
            return int((self._folder / _CODE).read_text())
        except (FileNotFoundError, ValueError):
            self.say(f"Grid Engine ended job {self.id}: qacct -j {self.id} says why")
            return 1

    def cancel(self) -> None:
        """Delete the job unless it has ended, and remove its folder."""
        super().cancel()
        shutil.rmtree(self._folder, ignore_errors=True)


def _made_folder(request: SgeRequest) -> Path:
    folder = Path(request.folder)
    try:
        folder.mkdir(mode=0o700)  # one that is there may have a script of somebody else
    except OSError as error:
        raise LaunchError(f"the folder of the job cannot be made: {error}") from error
    return folder


def options_of(spec: JobSpec) -> SgeOptions:
    """Return the options, checked.

    Raises:
        ValueError: one is unknown, or cannot be a word of a ``#$`` line; a group chooses its hosts.
    """
    for group in spec.groups:
        if group.select or group.hosts:
            raise ValueError(
                f"group {group.name}: Grid Engine gives a job slots wherever it finds them, so a group cannot choose "
                "its hosts; choose queues for the whole job with -o queue=NAME, or use launcher ssh on hosts you have"
            )
    return typed_options("sge", SgeOptions, spec.options)


def job_script(spec: JobSpec, options: SgeOptions, python: str, folder: str, directory: str, pythonpath: str) -> str:
    """Return the script. It asks for a slot per worker and server; the scheduler needs next to nothing."""
    lines = [f"-N pl-{spec.job_id}", f"-pe {options.pe} {spec.num_workers + spec.servers}"]
    lines += [f"-q {options.queue}"] if options.queue else []
    lines += [f"-l {options.resources}"] if options.resources else []
    lines += [f"-l h_rt={options.time}"] if options.time else []
    lines += [f"-P {options.project}"] if options.project else []
    lines += [f"-wd {directory}", f"-o {folder}/out", f"-e {folder}/err", "-S /bin/sh", "-notify", "-r no", "-R yes"]
    command = shlex.join([python, "-P", "-m", "paceline.launch.engines.sge", folder])
    path = [f"export PYTHONPATH={shlex.quote(pythonpath)}"] if pythonpath else []
    return "\n".join(["#!/bin/sh", *(f"#$ {line}" for line in lines), *path, f"exec {command}", ""])


# ---- the launcher inside a job ---------------------------------------------------------------------------------------


def read_hostfile(text: str) -> dict[str, int]:
    """Read lines of the form ``HOST SLOTS QUEUE@HOST PROCESSORS``; return the slots of each host.

    Raises:
        ValueError: a line has another form, or there is none.
    """
    found: Counter[str] = Counter()
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or not words[1].isdecimal():
            raise ValueError(f"PE_HOSTFILE: {line!r} is not HOST SLOTS QUEUE@HOST PROCESSORS")
        found[words[0]] += int(words[1])
    if not found:
        raise ValueError("PE_HOSTFILE names no host")
    return dict(found)


def on_allocation(spec: JobSpec, slots: Mapping[str, int]) -> JobSpec:
    """Return the spec with the hosts of an allocation: a slot for each server, the others for workers."""
    names = list(slots)
    taken = Counter(names[index % len(names)] for index in range(spec.servers))
    left = {name: max(0, slots[name] - taken[name]) for name in names}
    if sum(left.values()) < spec.num_workers:  # more servers than hosts: several share a slot
        left = dict(slots)
    return replace(spec, hosts=tuple(Host(name, slots=left[name]) for name in names))


def _run(spec: JobSpec, machine: Machine, folder: Path) -> int:
    """Run a job on the hosts of this one, and return its exit code."""
    try:
        slots = read_hostfile(Path(os.environ["PE_HOSTFILE"]).read_text())
    except (KeyError, OSError) as error:
        raise LaunchError(f"this is not a Grid Engine job with a parallel environment: {error}") from error
    file = folder / _AGENT

    def reach(host: Host, script: list[str]) -> list[str]:
        if not file.exists():
            file.write_text(agent_file(script))
        return ["qrsh", "-inherit", host.name, "/bin/sh", str(file)]

    plan = make_plan(on_allocation(spec, slots), machine)
    request = remote_request(plan, machine, "", reach)
    return RemoteJob(replace(request, explain=_explain)).wait()


def agent_file(script: list[str]) -> str:
    """Return the file that starts an agent: qrsh loses quotes, so its command has none.

    Grid Engine warns of a job's end by SIGUSR1 and SIGUSR2 to all its processes; only the launcher acts on it.
    """
    return f"#!/bin/sh\ntrap '' USR1 USR2\nexec {shlex.join(script)}\n"


def _explain(host: Host, link: AgentLink) -> str:
    text = "\n".join(link.errors) or link.noise or "no word"
    return f"the agent on {host.name} ended: `{shlex.join(['qrsh', '-inherit', host.name])}` says: {text}"


def _heed_notices() -> None:
    """Follow Grid Engine's notices: none is needed of a suspension; at the end workers have ``--grace`` to save."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, _terminate)


def _terminate(signum: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def main(words: Sequence[str]) -> int:
    """Run the job that a folder describes, and leave its exit code there."""
    [folder] = map(Path, words)
    text, environ, python = json.loads((folder / _SPEC).read_text())
    spec = from_json(text)
    _heed_notices()
    try:
        code = _run(spec, Machine(python, {}, environ, spec.directory), folder)
    except (PacelineError, ValueError) as error:
        print(f"paceline launch: {error}", file=sys.stderr)
        code = 1
    write_text(folder / _CODE, str(code))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
