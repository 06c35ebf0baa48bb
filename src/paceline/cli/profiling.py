"""``paceline profile``: a job that runs the user's script for a few rounds and writes how fast each worker is."""

from __future__ import annotations

import os
from collections.abc import Sequence

from paceline.cli import launch, launch_options
from paceline.cli.options import Option, Parser, UsageError, split_command, words_of

OPTIONS = (
    Option(("--speeds",), "file to write, on worker 0's machine (default: speeds)", "FILE"),
    Option(("--rounds",), "rounds to measure (default: 20)", "ROUNDS", int, least=1),
)

DESCRIPTION = """\
Start a job as paceline launch does, measure for each worker how long it computes in a round, write the speeds, and end
the job. Waits for other workers and for servers do not count. All other options are those of paceline launch."""

EPILOG = """\
Every worker must have the same batch size. The first three rounds are not measured.

example:
  paceline profile -n 4 --speeds speeds -- python train.py
  paceline group speeds --groups groups
  paceline launch -n 4 --groups groups -- python train.py --kv-store dist_gsync"""


def run(name: str, words: Sequence[str]) -> int:
    """Run ``paceline profile`` and return the job's exit code.

    Raises:
        UsageError: the command line is wrong.
        paceline.errors.PacelineError: the job cannot be started.
    """
    every = (*OPTIONS, *launch_options.OPTIONS)
    ours, command = split_command(words, every)
    usage = f"paceline {name} -n N [options] [--] command ..."
    options = Parser(name, every, usage, DESCRIPTION, EPILOG, launch_options.ADVICE).parse(ours)
    rounds = 20 if options.rounds is None else options.rounds
    if options.num_servers == 0:
        raise UsageError("with -s 0 nothing is measured: workers are timed between their pushes to servers")
    if options.groups == "auto":
        raise UsageError("--groups auto measures by itself; leave it out here, or use paceline launch")
    path = os.path.abspath(options.speeds or "speeds")
    if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK):
        raise UsageError(f"--speeds {path} cannot be written: it names a folder, or its folder cannot be used")
    before = _written(path)
    settings = ["--env", f"PACELINE_PROFILE={path}", "--env", f"PACELINE_PROFILE_ROUNDS={rounds}"]
    others = words_of(ours, every, lambda option: option not in OPTIONS)
    code = launch.run(name, [*settings, *others, "--", *command])
    if code == 0 and not options.dry_run:
        print(_report(path, before))
    return code


def _written(path: str) -> int:
    return os.stat(path).st_mtime_ns if os.path.exists(path) else 0


def _report(path: str, before: int) -> str:
    if _written(path) == before:
        why = "worker 0 runs on another machine, or the script ended before enough rounds were measured"
        return f"{path} was not written here: {why}"
    with open(path) as file:
        return file.read().rstrip()
