"""The script that Grid Engine runs. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from paceline.launch.options import backend_options
from paceline.launch.spec import JobSpec

OPTIONS = {
    "pe": "parallel environment with control_slaves TRUE (default: paceline)",
    "queue": "queues, separated by commas (default: any)",
    "resources": "resource request of a slot, as qsub -l has it: h_vmem=4G,gpu=1",
    "time": "limit of the run time: HH:MM:SS or seconds",
    "project": "project to charge, as qsub -P has it",
    "python": "interpreter on the hosts (default: the launcher's)",
}

_PLAIN = re.compile(r"[\w@%+=:,./*-]+")


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
        spec: of the job.
        options: as :func:`options_of` returns them.
        python: that runs the launcher inside.
        folder: of the job, on a file system that all hosts share.
        directory: where processes run.
        pythonpath: of the launcher.
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


def agent_file(script: list[str]) -> str:
    """Return the file that starts an agent: qrsh loses quotes, so what it runs has none.

    Grid Engine warns of a job's end by SIGUSR1 and SIGUSR2 to all its processes; only the launcher acts on it.
    """
    return f"#!/bin/sh\ntrap '' USR1 USR2\nexec {shlex.join(script)}\n"
