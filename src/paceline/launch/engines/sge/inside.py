"""The launcher inside a Grid Engine job: ``python -m paceline.launch.engines.sge.inside FOLDER``."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from paceline.errors import LaunchError, PacelineError
from paceline.launch.engines.sge.allocation import on_allocation, read_hostfile
from paceline.launch.engines.sge.script import agent_file
from paceline.launch.hosts import Host
from paceline.launch.planner import Machine, make_plan
from paceline.launch.remote import RemoteJob, RemoteRequest, agent_script
from paceline.launch.remote.link import AgentLink
from paceline.launch.spec import JobSpec
from paceline.launch.spec_json import from_json, to_json

SPEC, AGENT, CODE = "spec.json", "agent", "code"


@dataclass(frozen=True)
class Inside:
    """What the launcher outside leaves in the folder for the one inside."""

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


def request(spec: JobSpec, machine: Machine, environ: Mapping[str, str], folder: Path) -> RemoteRequest:
    """Return what to run on the hosts of this job, and write the file that starts agents.

    Raises:
        LaunchError: this is no job with a parallel environment.
        ValueError: the job does not fit its slots.
    """
    try:
        slots = read_hostfile(Path(os.environ["PE_HOSTFILE"]).read_text())
    except (KeyError, OSError) as error:
        raise LaunchError(f"this is not a Grid Engine job with a parallel environment: {error}") from error
    plan = make_plan(on_allocation(spec, slots), machine)
    script = agent_script(spec.options.get("python", ""), machine.python, plan.directory, environ.get("PYTHONPATH", ""))
    file = folder / AGENT
    file.write_text(agent_file(script))

    def command(host: Host) -> list[str]:
        return ["qrsh", "-inherit", host.name, "/bin/sh", str(file)]

    return RemoteRequest(plan, machine.python, command, environ)


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
        return RemoteJob(request(given.spec, machine, given.environ, folder), explain).wait()
    except (PacelineError, ValueError) as error:
        print(f"paceline launch: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
