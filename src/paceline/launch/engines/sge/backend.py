"""The backend that runs a job as one job of Grid Engine."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from paceline.errors import LaunchError
from paceline.launch.backends import Job
from paceline.launch.engines.sge.inside import CODE, SPEC, Inside, explain
from paceline.launch.engines.sge.inside import request as inside_request
from paceline.launch.job_spec import JobSpec
from paceline.launch.options import backend_options
from paceline.launch.planner import Machine, make_plan
from paceline.launch.remote import RemoteJob, forwarded
from paceline.launch.render import describe
from paceline.launch.supervise.guardian import Canceller
from paceline.launch.supervise.signals import SignalPipe

OPTIONS = {
    "pe": "parallel environment with control_slaves TRUE (default: paceline)",
    "queue": "queues, separated by commas (default: any)",
    "resources": "resource request of a slot, as qsub -l has it: h_vmem=4G,gpu=1",
    "time": "limit of the run time: HH:MM:SS or seconds",
    "project": "project to charge, as qsub -P has it",
    "python": "interpreter on the hosts (default: the launcher's)",
}

_PLAIN = re.compile(r"[\w@%+=:,./*-]+")

_SHOW_S, _LOOK_S = 0.2, 1.0
_CALL_S = 60.0
#: How long a job may take to end after qdel: the queue's ``notify`` is 60 s as installed.
_DELETE_S = 90.0


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

    def plan(self, spec: JobSpec, machine: Machine) -> SgeRequest:
        """Write the script.

        Raises:
            ValueError: an option cannot be; see also :func:`~paceline.launch.make_plan`.
        """
        options = options_of(spec)
        directory = spec.directory or machine.directory
        folder = os.path.join(directory, f".paceline-{spec.job_id}")
        if any(one.isspace() for one in folder):
            raise ValueError(f"Grid Engine cannot run in a directory with blanks in its name: {directory!r}")
        python = options.get("python", machine.python)
        there = replace(machine, python=python, cores={}, directory=directory)
        environ = forwarded(machine.environ)
        script = job_script(spec, options, python, folder, directory, environ.get("PYTHONPATH", ""))
        inside = "PE_HOSTFILE" in machine.environ
        placed = replace(spec, directory=directory, options={})
        return SgeRequest(placed, there, script, folder, options.get("pe", "paceline"), environ, inside)

    def render(self, request: SgeRequest) -> str:
        """Return the script and the processes; Grid Engine chooses their hosts."""
        plan = make_plan(request.spec, request.machine, alone=True)
        return f"{request.script}\n{describe(plan, environ=request.environ)}"

    def check(self, request: SgeRequest) -> None:
        """Look for the programs and the parallel environment.

        Raises:
            LaunchError: something is missing; the message lists the choices.
        """
        program = "qrsh" if request.inside else "qsub"
        if shutil.which(program) is None:
            raise LaunchError(f"the program {program!r} is not on the PATH: run this on a submit host of Grid Engine")
        if not request.inside:
            there = _call(["qconf", "-spl"]).split()
            if request.pe not in there:
                raise LaunchError(
                    f"Grid Engine has no parallel environment {request.pe!r}; it has {', '.join(there) or 'none'}: "
                    "-o pe=NAME"
                )

    def submit(self, request: SgeRequest) -> Job:
        """Submit the script; inside a job, return the job that starts agents when it is waited for.

        Raises:
            LaunchError: Grid Engine refused the script.
        """
        self.check(request)
        return InsideJob(request) if request.inside else SgeJob(request)


class InsideJob(Job):
    """A job in the slots of a Grid Engine job of the user's own; it runs while :meth:`wait` does.

    Args:
        request: the job to run.
    """

    def __init__(self, request: SgeRequest) -> None:
        self._request = request
        self.id = request.spec.job_id

    def wait(self) -> int:
        """Run the job and return its exit code.

        Raises:
            LaunchError: the allocation or a host cannot be used; no process runs.
        """
        folder = Path(self._request.folder)
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            return RemoteJob(inside_request(self._request.spec, self._request.machine, folder), explain).wait()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class SgeJob(Job):
    """A job of Grid Engine.

    Args:
        request: the job to submit.

    Raises:
        LaunchError: Grid Engine refused it.
    """

    def __init__(self, request: SgeRequest) -> None:
        self._folder = Path(request.folder)
        self._ended = False
        try:
            self._folder.mkdir(mode=0o700)
            given = Inside(request.spec, request.environ, request.machine.python)
            spec = self._folder / SPEC
            spec.touch(0o600)
            spec.write_text(given.text)
            script = self._folder / "script"
            script.write_text(request.script)
            self.id = _call(["qsub", "-terse", str(script)]).strip()
            self._canceller = Canceller(["qdel", self.id])
        except OSError as error:
            raise LaunchError(f"the folder of the job cannot be made: {error}") from error
        except BaseException:  # also Ctrl-C
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def wait(self) -> int:
        """Show the job's output until it ends; return its exit code, 1 if Grid Engine ended it.

        Raises:
            LaunchError: Grid Engine does not answer, or cannot end the job.
        """
        interrupted = 0
        print(f"[launch] Grid Engine job {self.id}", file=sys.stderr, flush=True)
        with SignalPipe() as signals, contextlib.ExitStack() as stack:
            stack.callback(self.cancel)
            streams = [(self._folder / "out", sys.stdout.fileno()), (self._folder / "err", sys.stderr.fileno())]
            tails = [stack.enter_context(FileTail(path, fd)) for path, fd in streams]
            while self._is_there():
                look_at = time.monotonic() + _LOOK_S
                while time.monotonic() < look_at and not interrupted:
                    time.sleep(_SHOW_S)
                    for tail in tails:
                        tail.show()
                    interrupted = next(iter(signals.read()), 0)
                if interrupted:
                    self._delete()
            self._ended = True
            for tail in tails:
                tail.show()
            return 128 + interrupted if interrupted else self._code()

    def cancel(self) -> None:
        """Delete the job, wait until it has ended, and remove its folder. Idempotent.

        Raises:
            LaunchError: Grid Engine cannot end it.
        """
        if not self._ended:
            self._delete()
        self._canceller.release()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _delete(self) -> None:
        """Delete the job and wait for its end, a moment longer than queues give notice."""
        with contextlib.suppress(LaunchError):  # it ended meanwhile
            _call(["qdel", self.id])
        until = time.monotonic() + _DELETE_S
        while self._is_there():
            if time.monotonic() > until:
                raise LaunchError(
                    f"Grid Engine job {self.id} has not ended {_DELETE_S:g} s after qdel: qdel -f {self.id}"
                )
            time.sleep(_SHOW_S)
        self._ended = True

    def logs(self) -> Iterator[str]:
        """Give the lines that the job has printed so far."""
        for name in ("out", "err"):
            with contextlib.suppress(FileNotFoundError):
                yield from (self._folder / name).read_text(errors="replace").splitlines()

    def _is_there(self) -> bool:
        try:
            _call(["qstat", "-j", self.id])
        except LaunchError as error:
            if "do not exist" in str(error):
                return False
            raise
        return True

    def _code(self) -> int:
        """Return the job's exit code that the launcher inside has left."""
        try:
            return int((self._folder / CODE).read_text())
        except (FileNotFoundError, ValueError):
            print(f"[launch] Grid Engine ended job {self.id}: qacct -j {self.id} says why", file=sys.stderr, flush=True)
            return 1


class FileTail:
    """Shows the additions to a growing file since the last look.

    Args:
        path: path of the file, which need not exist yet.
        fd: output descriptor.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd
        self._file: IO[bytes] | None = None

    def __enter__(self) -> FileTail:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def show(self) -> None:
        """Show the new text."""
        if self._file is None:
            with contextlib.suppress(FileNotFoundError):
                self._file = open(self._path, "rb")  # noqa: SIM115 - closed at exit
        while self._file is not None and (data := self._file.read(65536)):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]


def _call(words: list[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_CALL_S)
    except FileNotFoundError:
        raise LaunchError(f"the program {words[0]!r} is not on the PATH: run this on a submit host") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{words[0]} did not answer within {_CALL_S:g} s") from None
    if done.returncode:
        raise LaunchError(f"{' '.join(words[:2])}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def slots(spec: JobSpec) -> int:
    """Return how many slots a job takes: one per worker and server. The scheduler needs next to nothing."""
    return spec.num_workers + spec.servers


def options_of(spec: JobSpec) -> Mapping[str, str]:
    """Return the options, checked.

    Raises:
        ValueError: one is unknown, or cannot be a word of a ``#$`` line; a group chooses its hosts.
    """
    options = backend_options("sge", OPTIONS, spec.options)
    for name, text in options.items():
        if not _PLAIN.fullmatch(text):
            raise ValueError(f"option {name}={text!r}: no blanks or quotes are possible there")
    for group in spec.groups:
        if group.select or group.hosts:
            raise ValueError(
                f"group {group.name}: Grid Engine gives a job slots wherever it finds them, so a group cannot choose "
                "its hosts; choose queues for the whole job with -o queue=NAME, or use launcher ssh on hosts you have"
            )
    return options


def job_script(
    spec: JobSpec, options: Mapping[str, str], python: str, folder: str, directory: str, pythonpath: str
) -> str:
    """Return the script.

    Args:
        spec: the job spec.
        options: as :func:`options_of` returns them.
        python: interpreter of the launcher inside.
        folder: the job's folder, on a file system that all hosts share.
        directory: processes' working directory.
        pythonpath: the launcher's ``PYTHONPATH``.
    """
    lines = [f"-N pl-{spec.job_id}", f"-pe {options.get('pe', 'paceline')} {slots(spec)}"]
    lines += [f"-q {options['queue']}"] if "queue" in options else []
    lines += [f"-l {options['resources']}"] if "resources" in options else []
    lines += [f"-l h_rt={options['time']}"] if "time" in options else []
    lines += [f"-P {options['project']}"] if "project" in options else []
    lines += [f"-wd {directory}", f"-o {folder}/out", f"-e {folder}/err", "-S /bin/sh", "-notify", "-r no", "-R yes"]
    command = shlex.join([python, "-m", "paceline.launch.engines.sge.inside", folder])
    path = [f"export PYTHONPATH={shlex.quote(pythonpath)}"] if pythonpath else []
    return "\n".join(["#!/bin/sh", *(f"#$ {line}" for line in lines), *path, f"exec {command}", ""])
