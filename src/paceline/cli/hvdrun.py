"""``paceline hvdrun``: horovodrun's flags, for ``paceline launch`` without servers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from paceline.cli import launch
from paceline.cli.launch_options import ADVICE
from paceline.cli.options import Option, Parser, UsageError, split_command, usage_errors
from paceline.launch import parse_host_list
from paceline.launch.host_list import LOCALHOST

#: Flags that set a variable: flag, variable, factor of a number, summary.
_VARIABLES: tuple[tuple[str, str, float, str], ...] = (
    ("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", 1024 * 1024, "most MiB that are fused"),
    ("--cycle-time-ms", "HOROVOD_CYCLE_TIME", 1, "how long requests are collected"),
    ("--cache-capacity", "HOROVOD_CACHE_CAPACITY", 1, "operations that the response cache holds"),
    ("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", 1, "age of a stall that is reported"),
    ("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 1, "age of a stall that ends all"),
    ("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", 1, "longest time of one operation"),
    ("--start-timeout", "HOROVOD_START_TIMEOUT", 1, "how long hvd.init waits for all ranks"),
)
_SWITCHES: tuple[tuple[str, str, str, str], ...] = (
    ("--disable-cache", "HOROVOD_CACHE_CAPACITY", "0", "no response cache"),
    ("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "1", "do not look for stalls"),
    ("--hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", "1", "reduce inside each host first (default)"),
    ("--no-hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", "0", "reduce among all ranks at once"),
)

OPTIONS = (
    Option(("-n", "-np", "--num-proc"), "number of ranks", "N", int),
    Option(("-H", "--hosts"), "hosts with slots, h:n,h:n; only this host can be used", "HOSTS"),
    *(Option((flag,), summary, "NUMBER", float, least=0) for flag, _, _, summary in _VARIABLES),
    *(Option((flag,), summary) for flag, _, _, summary in _SWITCHES),
    Option(("--gloo",), "data go by Gloo and shared memory (always so)"),
    Option(("--dry-run",), "print the processes and their environment, start nothing"),
)

USAGE = "paceline hvdrun -np N [options] command ..."

DESCRIPTION = """\
Run a script that uses paceline.hvd on N ranks of this machine, with the flags of horovodrun. It is paceline launch
without servers: output lines begin with the rank, and when a rank fails the others are ended."""

EPILOG = """\
example:
  paceline hvdrun -np 2 python train.py"""


def run(name: str, words: Sequence[str]) -> int:
    """Run ``paceline hvdrun`` and return the job's exit code."""
    ours, command = split_command(words, OPTIONS)
    options = Parser(name, OPTIONS, USAGE, DESCRIPTION, EPILOG, ADVICE).parse(ours)
    found = ["--num-workers", str(_count(options)), "--num-servers", "0"]
    for variable, text in variables(options).items():
        found += ["--env", f"{variable}={text}"]
    if options.dry_run:
        found.append("--dry-run")
    return launch.run("launch", [*found, "--", *command])


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that flags set."""
    found: dict[str, str] = {}
    for flag, variable, factor, _ in _VARIABLES:
        value = getattr(options, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            number = value * factor
            found[variable] = str(int(number) if number.is_integer() or factor != 1 else number)
    for flag, variable, text, _ in _SWITCHES:
        if getattr(options, flag.removeprefix("--").replace("-", "_")):
            found[variable] = text
    return found


def _count(options: argparse.Namespace) -> int:
    with usage_errors("-H takes host:slots, as in localhost:2: "):
        hosts = () if options.hosts is None else parse_host_list(options.hosts, number_is_slots=True)
    for host in hosts:
        if host.name not in (LOCALHOST, "localhost", os.uname().nodename):
            raise UsageError(f"{host} is another host; start ranks there by mpirun, torchrun or a cluster manager")
    slots = sum(1 if host.slots is None else host.slots for host in hosts)
    wanted = options.num_proc if options.num_proc is not None else slots
    if options.num_proc is None and not slots:
        raise UsageError("the number of ranks is missing; give -np, as in: paceline hvdrun -np 2 python train.py")
    if slots and wanted > slots:
        raise UsageError(f"-np {wanted} and only {slots} slots in -H")
    return int(wanted)
