"""``paceline launch``."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence

from paceline import config
from paceline.cli.options import Option, Parser, UsageError, split_command
from paceline.consistency import weighting_names
from paceline.launch import BACKENDS, Graces, JobSpec, Machine, backend, describe, make_plan
from paceline.launch.preflight import readable_file

OPTIONS = (
    Option(
        ("-n", "-np", "--num-workers"),
        "number of workers",
        "N",
        int,
        elsewhere=("--np", "--num-proc", "--nproc-per-node", "--ntasks", "--workers"),
    ),
    Option(
        ("-s", "--num-servers"),
        "number of servers (default: as many as workers; 0: workers only)",
        "S",
        int,
        elsewhere=("--servers",),
    ),
    Option(("--launcher",), f"where processes run: {', '.join(BACKENDS)} (default: local)", "NAME", default="local"),
    Option(("--env",), "set a variable in every process; may be repeated", "NAME=VALUE", repeat=True),
    Option(("--staleness",), "rounds a worker may be ahead of the slowest (dist_ssync, dist_gsync)", "ROUNDS"),
    Option(("--groups",), "groups file of dist_gsync", "FILE"),
    Option(
        ("--allow-optimizer",),
        "an optimizer that servers may load beside those of torch.optim; may be repeated",
        "pkg.mod:Class",
        repeat=True,
    ),
    Option(
        ("--no-torchrun-env",),
        "do not set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on, for scripts that would start DDP by them",
    ),
    Option(("--weighting",), f"factor of a stale update: {', '.join(weighting_names())}", "NAME"),
    Option(("--age",), "missed updates beyond which a push is dropped (dist_async, dist_ssync, dist_ksync)", "UPDATES"),
    Option(("--insecure",), "no key: only for a network that nobody else can reach"),
    Option(("--timeout",), "how long any request may take (default: 300)", "SECONDS", float),
    Option(("--start-timeout",), "how long to wait for all processes to join (default: 60)", "SECONDS", float),
    Option(("--grace",), "how long the others may go on after a failure (default: 6)", "SECONDS", float),
    Option(("--dry-run",), "print the processes and their environment, start nothing"),
)

#: Options of stores, of servers, and of joining a job.
_OF_SERVERS = frozenset(
    (
        "--staleness",
        "--groups",
        "--weighting",
        "--age",
        "--allow-optimizer",
        "--insecure",
        "--timeout",
        "--start-timeout",
    )
)

USAGE = "paceline launch -n N [options] [--] command ..."

DESCRIPTION = """\
Start a job on this machine: one scheduler, S servers, and N workers that each run the command. All output appears
here; every line begins with the role and rank that printed it. The job ends when all workers are done, or when a
process fails. No process is left running."""

EPILOG = """\
examples:
  paceline launch -n 4 -- python train.py --lr 0.1
  paceline launch -n 4 -s 1 --allow-optimizer mylib.optim:Lion -- python train.py
  paceline launch -n 2 --dry-run -- python train.py

exit code:
  0 when all workers are done, otherwise that of the process that failed first (128 + n for signal n);
  130 after Ctrl-C, 143 after SIGTERM, 2 for a wrong command line, 127 for a command that does not exist.

ports:
  The scheduler binds a free port itself. MASTER_PORT of torch.distributed is a port that was free when the workers
  started; another program can take it before worker 0 binds it. To choose it yourself: MASTER_PORT=29500 paceline
  launch ..., or --env MASTER_PORT=29500."""


def run(name: str, words: Sequence[str]) -> int:
    """Run ``paceline launch`` and return the job's exit code.

    Raises:
        UsageError: the command line is wrong.
        paceline.errors.PacelineError: a setting cannot work, or the job cannot be started.
    """
    ours, command = split_command(words, OPTIONS)
    options = Parser(name, OPTIONS, USAGE, DESCRIPTION, EPILOG).parse(ours)
    config.check_names(os.environ | dict(_variable(text) for text in options.env))
    try:
        chosen = backend(options.launcher)
        plan = make_plan(job_spec(options, command), Machine.here())
    except ValueError as error:
        raise UsageError(str(error)) from error
    chosen.check(plan)
    if options.dry_run:
        print(describe(plan), end="")
        return 0
    return chosen.run(plan)


def job_spec(options: argparse.Namespace, command: Sequence[str]) -> JobSpec:
    """Turn parsed options into a job.

    Raises:
        UsageError: the number of workers is missing, or a variable has no value.
        ValueError: see :class:`~paceline.launch.JobSpec`.
        paceline.errors.PacelineError: the groups file cannot be read, or a setting cannot work.
    """
    if options.num_workers is None:
        raise UsageError("the number of workers is missing; give -n, as in: paceline launch -n 2 -- python train.py")
    _refuse_unused(options)
    return JobSpec(
        command=tuple(command),
        num_workers=options.num_workers,
        num_servers=options.num_servers,
        job_id=secrets.token_hex(4),
        env=dict(_variable(text) for text in options.env),
        settings=_settings(options),
        torchrun_env=not options.no_torchrun_env,
        graces=_graces(options),
    )


def _refuse_unused(options: argparse.Namespace) -> None:
    """Refuse options that change nothing in a job without servers."""
    given = {option.flags[-1]: getattr(options, option.name) for option in OPTIONS if option.flags[-1] in _OF_SERVERS}
    unused = [flag for flag, value in given.items() if value not in (None, False, [])]
    if options.num_servers == 0 and unused:
        raise UsageError(f"{', '.join(unused)} changes nothing with -s 0: then there are workers only, and no stores")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--env {text!r} is not NAME=VALUE; all processes inherit the variables of this shell anyway")
    return name, value


def _settings(options: argparse.Namespace) -> dict[str, str]:
    groups = None if options.groups is None else readable_file(options.groups, "the groups file")
    given = {
        "staleness": options.staleness,
        "groups": groups,
        "weighting": options.weighting,
        "allow_optimizer": ",".join(options.allow_optimizer) or None,
        "age": options.age,
        "insecure": "1" if options.insecure else None,
        "timeout_s": options.timeout,
        "start_timeout_s": options.start_timeout,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _graces(options: argparse.Namespace) -> Graces:
    graces = Graces()
    name = config.variable("start_timeout_s")
    text = str(options.start_timeout) if options.start_timeout is not None else os.environ.get(name)
    return Graces(
        start_s=config.parse("start_timeout_s", text, name) if text else graces.start_s,
        survivors_s=graces.survivors_s if options.grace is None else options.grace,
    )
