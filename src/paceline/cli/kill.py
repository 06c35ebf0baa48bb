"""``paceline kill``: ends a job by its launcher, or what jobs have left on hosts by the mark in their environment."""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import shlex
import signal
import sys
from collections.abc import Sequence

from paceline.cli.options import Option, Parser, UsageError, agrees, read_hosts, shell_words
from paceline.errors import LaunchError
from paceline.host.plain_text import plain
from paceline.launch import Host, runtime
from paceline.launch.preflight import check_program
from paceline.launch.processes import MarkedProcess, kill, marked, wait_for
from paceline.launch.remote import run_all
from paceline.launch.ssh import over_ssh
from paceline.naming import meant
from paceline.observe.table import duration, plural, table

OPTIONS = (
    Option(("-H", "--hosts"), "end what jobs of yours have left on these hosts: a hostfile, or a list h1,h2", "HOSTS"),
    Option(("--here",), "end what jobs of yours run on this host"),
    Option(("-y", "--yes"), "with -H or --here: do not ask"),
    Option(("--all-users",), "with -H or --here: also what jobs of other users run there"),
    Option(("--dry-run",), "with -H or --here: list what would end, end nothing"),
    Option(("--ssh",), "command that reaches a host (default: ssh)", "COMMAND"),
)
_USAGE = "paceline kill [JOB], or paceline kill [JOB] --here, or paceline kill [JOB] -H HOSTS"
_DESCRIPTION = """\
End a job and everything it has started; or, with -H or --here, end the processes that jobs have left on hosts, after a
list of them and a question."""
#: How long a job may take to end after each signal.
_END_S = 20.0
#: How long a host may take to answer, and to end what it has.
_HOST_S = 60.0
_HEAD = ("pid", "user", "job", "role", "rank", "age", "command")
_COMMAND_WIDTH = 80


def run(name: str, words: Sequence[str]) -> int:
    """Run ``paceline kill``."""
    job, options = Parser(name, OPTIONS, _USAGE, _DESCRIPTION).parse_job(words)
    _refuse_unused(options)
    if options.here:
        return _kill_here(job, options)
    if options.hosts is not None:
        ssh = shell_words("ssh" if options.ssh is None else options.ssh)
        return _kill_on(read_hosts(options.hosts), ssh, job, options)
    return _end(runtime.find(job))


def _refuse_unused(options: argparse.Namespace) -> None:
    if options.here and options.hosts is not None:
        raise UsageError("give --here or -H, not both")
    if options.ssh is not None and options.hosts is None:
        raise UsageError("--ssh reaches hosts; name them with -H")
    given = [option.flags[-1] for option in OPTIONS[2:5] if getattr(options, option.name)]
    if given and not options.here and options.hosts is None:
        raise UsageError(f"{', '.join(given)}: only with --here or -H")


def _end(record: runtime.JobRecord) -> int:
    """Have the launcher end its job; kill it if it does not."""
    for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signum)
        if wait_for(lambda: not record.is_alive, _END_S, 0.05):
            print(f"job {record.id} has ended")
            return 0
    raise LaunchError(f"the launcher of job {record.id} (pid {record.pid}) cannot be killed")


def _kill_here(job: str, options: argparse.Namespace) -> int:
    found = marked(job)
    kept = found if options.all_users else [one for one in found if one.uid == os.getuid()]
    jobs = meant(job, (one.job for one in kept or found))
    if job and len(jobs) > 1:
        raise LaunchError(f"several jobs begin with {job!r}: {', '.join(jobs)}; name one")
    found, kept = ([one for one in some if one.job in jobs] for some in (found, kept))
    others = len(found) - len(kept)
    print(shown(kept) if kept else f"nothing of {f'job {job}' if job else 'a job'} of yours runs here")
    if others:
        print(f"({plural(others, 'process', 'processes')} of other users left out: --all-users)")
    if kept and not options.dry_run and (options.yes or _agreed(f"these {len(kept)}")):
        kill(kept)
        print(f"{plural(len(kept), 'process', 'processes')} killed")
    return 0


def shown(processes: Sequence[MarkedProcess]) -> str:
    """Return a table of processes."""
    rows = [
        (str(one.pid), _user(one.uid), one.job, one.role, one.rank, duration(one.age_s), one.command[:_COMMAND_WIDTH])
        for one in processes
    ]
    return table(_HEAD, rows)


def _user(uid: int) -> str:
    try:
        return str(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return str(uid)


def _agreed(what: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(f"nothing was ended: there is no terminal to ask at; end {what} with --yes")
    return agrees(f"end {what}?", sys.stdout)


def _kill_on(hosts: Sequence[Host], ssh: Sequence[str], job: str, options: argparse.Namespace) -> int:
    """End what jobs have left on hosts, side by side; without ``--yes`` after a list and a question."""
    check_program(ssh[0], "openssh-client")
    flags = [*([job] if job else []), *(["--all-users"] if options.all_users else [])]
    if options.dry_run or not options.yes:
        code, lines = _run_on(hosts, ssh, [*flags, "--dry-run"])
        is_any = any(line.split()[:1] == [_HEAD[0]] for line in lines)
        if options.dry_run or not is_any or not _agreed("these processes"):
            return code
    return _run_on(hosts, ssh, [*flags, "--yes"])[0]


def _run_on(hosts: Sequence[Host], ssh: Sequence[str], flags: Sequence[str]) -> tuple[int, list[str]]:
    """Run ``paceline kill --here`` on hosts and show its output; return 1 if it fails on any, and its lines."""
    words = shlex.join(["-P", "-m", "paceline", "kill", "--here", *flags])
    search = f'for p in {shlex.quote(sys.executable)} python3; do command -v "$p" >/dev/null && exec "$p" {words}; done'
    path = os.environ.get("PYTHONPATH", "")
    script = f"PYTHONPATH={shlex.quote(path)}; export PYTHONPATH; {search}"
    shown, has_failed = list[str](), False
    commands = {host.name: over_ssh(ssh, host, ["sh", "-c", script]) for host in hosts}
    for name, code, said in run_all(commands, _HOST_S):
        lines = (said.strip() or f"no word (exit code {code})").splitlines()
        print("\n".join(plain(f"{name}: {line}") for line in lines), flush=True)
        shown, has_failed = [*shown, *lines], has_failed or code != 0
    return int(has_failed), shown
