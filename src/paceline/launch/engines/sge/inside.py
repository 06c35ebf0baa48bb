"""The launcher inside a Grid Engine job, on its hosts: ``python -m paceline.launch.engines.sge.inside FOLDER``."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from paceline.errors import LaunchError, PacelineError
from paceline.launch.host_list import Host
from paceline.launch.job_spec import JobSpec, from_json, to_json
from paceline.launch.planner import Machine, make_plan
from paceline.launch.remote import RemoteJob, RemoteRequest, remote_request
from paceline.launch.remote.agent_link import AgentLink

SPEC, AGENT, CODE = "spec.json", "agent", "code"


@dataclass(frozen=True)
class Slots:
    """A line of the file that ``PE_HOSTFILE`` names."""

    host: str
    count: int


def read_hostfile(text: str) -> tuple[Slots, ...]:
    """Read lines of the form ``HOST SLOTS QUEUE@HOST PROCESSORS``.

    Raises:
        ValueError: a line has another form, or there is none.
    """
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or not words[1].isdecimal():
            raise ValueError(f"PE_HOSTFILE: {line!r} is not HOST SLOTS QUEUE@HOST PROCESSORS")
        found.append(Slots(words[0], int(words[1])))
    if not found:
        raise ValueError("PE_HOSTFILE names no host")
    return tuple(found)


def on_allocation(spec: JobSpec, slots: tuple[Slots, ...]) -> JobSpec:
    """Return the spec with the hosts of an allocation: a slot for each server, the others for workers."""
    free = {one.host: 0 for one in slots}
    for one in slots:
        free[one.host] += one.count
    names = list(free)
    taken = dict.fromkeys(names, 0)
    for index in range(spec.servers):
        taken[names[index % len(names)]] += 1
    left = {name: max(0, free[name] - taken[name]) for name in names}
    if sum(left.values()) < spec.num_workers:  # more servers than hosts: several share a slot
        left = free
    return replace(spec, hosts=tuple(Host(name, slots=left[name]) for name in names))


@dataclass(frozen=True)
class Inside:
    """The data that the launcher outside leaves in the folder for the one inside."""

    spec: JobSpec
    environ: Mapping[str, str]
    """Variables of the user's shell that processes get."""
    python: str

    @property
    def text(self) -> str:
        """As JSON. It holds the user's variables: it must not be shown."""
        return json.dumps([to_json(self.spec), dict(self.environ), self.python])

    @classmethod
    def read(cls, text: str) -> Inside:
        """Return what :attr:`text` says.

        Raises:
            ValueError: it is of another version.
        """
        spec, environ, python = json.loads(text)
        return cls(from_json(spec), environ, python)


def request(spec: JobSpec, machine: Machine, folder: Path) -> RemoteRequest:
    """Return what to run on the hosts of this job, and write the file that starts agents.

    Raises:
        LaunchError: this is no job with a parallel environment.
        ValueError: the job does not fit its slots.
    """
    try:
        slots = read_hostfile(Path(os.environ["PE_HOSTFILE"]).read_text())
    except (KeyError, OSError) as error:
        raise LaunchError(f"this is not a Grid Engine job with a parallel environment: {error}") from error
    file = folder / AGENT

    def reach(host: Host, script: list[str]) -> list[str]:
        if not file.exists():
            file.write_text(agent_file(script))
        return ["qrsh", "-inherit", host.name, "/bin/sh", str(file)]

    plan = make_plan(on_allocation(spec, slots), machine)
    return remote_request(plan, machine, spec.options.get("python", ""), reach)


def agent_file(script: list[str]) -> str:
    """Return the file that starts an agent: qrsh loses quotes, so its command has none.

    Grid Engine warns of a job's end by SIGUSR1 and SIGUSR2 to all its processes; only the launcher acts on it.
    """
    return f"#!/bin/sh\ntrap '' USR1 USR2\nexec {shlex.join(script)}\n"


def explain(host: Host, link: AgentLink) -> str:
    """Return why the agent of a host ended."""
    text = "\n".join(link.errors) or link.noise or "no word"
    return f"the agent on {host.name} ended: `{shlex.join(['qrsh', '-inherit', host.name])}` says: {text}"


def end_on_notice() -> None:
    """Take Grid Engine's notice of the end (SIGUSR1: suspension, SIGUSR2: kill) for SIGTERM."""

    def pass_on(signum: int, frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR2, pass_on)


def main(words: Sequence[str]) -> int:
    """Run the job that a folder describes, and leave its exit code there."""
    [folder] = words
    code = _run(Path(folder))
    unfinished = Path(folder, f"{CODE}.new")
    unfinished.write_text(str(code))
    unfinished.rename(Path(folder, CODE))
    return code


def _run(folder: Path) -> int:
    given = Inside.read((folder / SPEC).read_text())
    machine = Machine(given.python, {}, given.environ, given.spec.directory)
    end_on_notice()
    try:
        return RemoteJob(request(given.spec, machine, folder), explain).wait()
    except (PacelineError, ValueError) as error:
        print(f"paceline launch: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
