"""The ``paceline`` command: imports one subcommand, runs it, and prints errors in one line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence

import paceline
from paceline.cli.options import UsageError
from paceline.errors import ConfigError, LaunchError, PacelineError
from paceline.launch.preflight import NOT_FOUND_CODE, CommandNotFoundError
from paceline.naming import suggestion

#: By subcommand: its module, with its function ``(name, words) -> exit code`` unless that is ``run``; and a summary. It
#: raises ``UsageError`` for a wrong command line, ``PacelineError`` for all else.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "up": ("paceline.cli.up", "check and measure hosts, plan a job for them, and start it"),
    "launch": ("paceline.cli.launch", "start a job: scheduler, servers and workers"),
    "hvdrun": ("paceline.cli.hvdrun", "start a job of the Horovod interface, with horovodrun's flags"),
    "jobs": ("paceline.cli.status:run_jobs", "list your jobs whose launcher runs on this machine"),
    "status": ("paceline.cli.status", "show the processes of a job: round, pace, whom each waits for"),
    "top": ("paceline.cli.top", "watch a running job: the parts of each worker's steps, and who is slow"),
    "trace": ("paceline.cli.trace", "write a trace of the next rounds of a running job"),
    "story": ("paceline.cli.story", "show the last seconds of a job: events, waits and deaths of its members"),
    "drain": ("paceline.cli.drain", "let a worker, or those of a host, leave a job; the others go on"),
    "replay": ("paceline.cli.replay", "show who was in a job from when on, and which samples were trained on"),
    "kill": ("paceline.cli.kill", "end a job, or what jobs have left on hosts"),
    "doctor": ("paceline.cli.doctor", "check hosts: ssh, Python, versions, clock, network, directory"),
    "scheduler": ("paceline.cli.roles", "run the scheduler of a job"),
    "server": ("paceline.cli.roles", "run a server of a job"),
    "group": ("paceline.cli.grouping", "group workers by measured speed"),
    "profile": ("paceline.cli.profiling", "measure how fast each worker is"),
    "simulate": ("paceline.cli.simulate", "say what a cluster would do, before it does it"),
    "plan": ("paceline.cli.planning", "recommend servers for a job, from how each layout would scale"),
    "completion": ("paceline.cli.completion", "complete commands and options in bash, zsh or fish"),
    "run": ("paceline.cli.started:run_inside", "run a job inside an allocation (the launcher submits it)"),
    "agent": ("paceline.cli.started:run_agent", "run the processes of one host (the launcher starts it there)"),
}

USAGE_CODE = 2


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of this process, and return the exit code."""
    words = sys.argv[1:] if words is None else list(words)
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"paceline {paceline.__version__}")
        return 0
    return _run(words[0], words[1:])


def overview() -> str:
    """Return the list of subcommands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: paceline COMMAND [options]",
            "",
            "Data-parallel training of PyTorch models on machines that are not alike.",
            "",
            *lines,
            "",
            "paceline COMMAND --help prints the options; paceline --version prints the version.",
        ]
    )


def _run(name: str, words: Sequence[str]) -> int:
    try:
        if name not in COMMANDS:
            raise UsageError(f"unknown command {name!r}{suggestion(name, COMMANDS)}")
        module, _, function = COMMANDS[name][0].partition(":")
        return int(getattr(importlib.import_module(module), function or "run")(name, words))
    except (UsageError, PacelineError) as error:
        return _refused(name, error)
    except FileNotFoundError as error:
        if error.filename is not None:
            raise
        if "temporary" in str(error):  # the words of tempfile, which names no file
            return _refused(name, LaunchError(f"{error.strerror}: set TMPDIR to a folder that can be written"))
        why = "this directory does not exist any more; change to another one, or again to it"  # os.getcwd names no file
        return _refused(name, LaunchError(why))


def _refused(name: str, error: Exception) -> int:
    known = f" {name}" if name in COMMANDS else ""
    more = f"\ntry: paceline{known} --help" if isinstance(error, UsageError) else ""
    from paceline.host.plain_text import plain  # errors quote other hosts

    print(plain(f"paceline{known}: {error}{more}", "\n\t"), file=sys.stderr)
    if isinstance(error, UsageError | ConfigError):
        return USAGE_CODE
    return NOT_FOUND_CODE if isinstance(error, CommandNotFoundError) else 1
