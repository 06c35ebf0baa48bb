"""The batch script of a Slurm job. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping

from paceline.launch.groups import WorkerGroup
from paceline.launch.spec import JobSpec

#: Variable that brings the job spec into the allocation. It is no word of a command line.
SPEC_VARIABLE = "PACELINE_SPEC"

#: Options that become directives of the same name, for every component.
_DIRECTIVES = ("partition", "account", "qos", "time", "reservation", "constraint")


def batch_script(spec: JobSpec, python: str, directory: str, pythonpath: str) -> str:
    """Return a script for sbatch: one component of a heterogeneous job per worker group, then our launcher.

    Slurm sends SIGTERM to the launcher ``signal`` seconds before the time limit; the launcher passes it on.
    """
    options = spec.options
    lines = ["#!/bin/sh", f"#SBATCH --job-name=paceline-{spec.job_id}", f"#SBATCH --output={output(spec)}"]
    lines += [f"#SBATCH --chdir={directory}", "#SBATCH --export=ALL", f"#SBATCH --signal=B:TERM@{lead_s(options)}"]
    for index, group in enumerate(spec.worker_groups):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [f"#SBATCH {directive}" for directive in directives(group, options)]
    lines += [f"export PYTHONPATH={shlex.quote(pythonpath)}"] if pythonpath else []
    lines.append(f"exec {shlex.quote(python)} -m paceline run")
    return "\n".join(lines) + "\n"


def output(spec: JobSpec) -> str:
    """Return the file that takes the job's output, in Slurm's pattern."""
    return spec.options.get("output", f"paceline-{spec.job_id}.out")


def lead_s(options: Mapping[str, str]) -> int:
    """Return how many seconds before its end a job gets SIGTERM.

    Raises:
        ValueError: the option is no number.
    """
    try:
        return int(options.get("signal", "60"))
    except ValueError:
        raise ValueError(f"-o signal={options['signal']}: it is a number of seconds") from None


def directives(group: WorkerGroup, options: Mapping[str, str]) -> Iterator[str]:
    """Yield what a group asks for.

    Raises:
        ValueError: ``nodes`` is no number, or a label means nothing to Slurm.
    """
    nodes, tasks = _shape(group, options)
    yield f"--nodes={nodes}"
    yield f"--ntasks-per-node={tasks}"
    for name in _DIRECTIVES:
        value = group.select.get(name, options.get(name, ""))
        if value:
            yield f"--{name}={value}"
    for name in group.select:
        if name not in _DIRECTIVES:
            known = ", ".join(_DIRECTIVES)
            raise ValueError(f"group {group.name}: select={name} means nothing to Slurm; it has {known}")
    if group.hosts:
        yield f"--nodelist={','.join(host.name for host in group.hosts)}"
    if "cpus" in group.resources:
        yield f"--cpus-per-task={group.resources['cpus']}"
    if "gpus" in group.resources:
        yield f"--gpus-per-node={int(group.resources['gpus']) * tasks}"
    if "memory" in group.resources:
        yield f"--mem={_memory(group.resources['memory'], tasks)}"


def _shape(group: WorkerGroup, options: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of nodes of a group and of its workers on each."""
    if group.slots is not None:
        tasks = min(group.slots, group.count)
        return math.ceil(group.count / tasks), tasks
    nodes = len(group.hosts)
    if not nodes:
        try:
            nodes = int(options.get("nodes", group.count))
        except ValueError:
            raise ValueError(f"-o nodes={options['nodes']} is not a number") from None
    nodes = min(nodes, group.count)
    return nodes, math.ceil(group.count / nodes)


def _memory(text: str, tasks: int) -> str:
    """Return the memory of a node in MiB from that of a worker, as in ``8Gi`` or ``500M``."""
    number = text.rstrip("KMGTibB")
    unit = text[len(number) :][:1]
    factor = {"K": 1 / 1024, "M": 1, "": 1, "G": 1024, "T": 1024 * 1024}[unit]
    return str(math.ceil(float(number) * factor * tasks))
