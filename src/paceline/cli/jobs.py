"""``paceline jobs`` and ``paceline kill``."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from paceline.cli.hosts import read_hosts
from paceline.cli.options import Option, Parser, UsageError
from paceline.cli.table import table
from paceline.errors import LaunchError
from paceline.launch import Host, runtime
from paceline.launch.marked import kill_marked
from paceline.launch.ssh import ssh_command

_KILL_OPTIONS = (
    Option(
        ("-H", "--hosts"),
        "kill what jobs of yours have left on these hosts: a hostfile, or a list h1,h2",
        "HOSTS",
    ),
    Option(("--here",), "kill what jobs of yours run on this host"),
    Option(("--ssh",), "command that reaches a host (default: ssh)", "COMMAND", default="ssh"),
)
OPTIONS: Mapping[str, tuple[Option, ...]] = {"jobs": (), "kill": _KILL_OPTIONS}
#: How long a job may take to end after each signal.
_END_S = 20.0


def run(name: str, words: Sequence[str]) -> int:
    """Run ``paceline jobs`` or ``paceline kill``.

    Raises:
        UsageError: the command line is wrong.
        LaunchError: there is no such job.
    """
    return _jobs(words) if name == "jobs" else _kill(words)


def _jobs(words: Sequence[str]) -> int:
    Parser("jobs", (), "paceline jobs", "List your jobs whose launcher runs on this machine.").parse(words)
    rows = [
        (
            record.id,
            str(record.pid),
            time.strftime("%H:%M:%S", time.localtime(record.started)),
            f"{record.workers}+{record.servers}",
            ",".join(record.hosts),
            record.command,
        )
        for record in runtime.jobs()
    ]
    print(table(("job", "pid", "started", "n+s", "hosts", "command"), rows) if rows else "no job of yours runs here")
    return 0


def _kill(words: Sequence[str]) -> int:
    named = [word for index, word in enumerate(words) if not word.startswith("-") and not _is_value(words, index)]
    rest = [word for index, word in enumerate(words) if word.startswith("-") or _is_value(words, index)]
    usage = "paceline kill JOB, or paceline kill [JOB] -H HOSTS"
    options = Parser("kill", _KILL_OPTIONS, usage, "End a job and everything it has started.").parse(rest)
    if len(named) > 1:
        raise UsageError(f"one job at a time, not {' and '.join(named)}")
    if options.here:
        print(f"{kill_marked(named[0] if named else '')} processes killed")
        return 0
    if options.hosts is not None:
        return _kill_on(read_hosts(options.hosts), shlex.split(options.ssh), named)
    return _end(runtime.find(named[0] if named else None))


def _is_value(words: Sequence[str], index: int) -> bool:
    return index > 0 and words[index - 1] in ("-H", "--hosts", "--ssh")


def _end(record: runtime.JobRecord) -> int:
    """Have the launcher end its job; kill it if it does not."""
    for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signum)
        until = time.monotonic() + _END_S
        while record.is_alive and time.monotonic() < until:
            time.sleep(0.05)
        if not record.is_alive:
            print(f"job {record.id} has ended")
            return 0
    raise LaunchError(f"the launcher of job {record.id} (pid {record.pid}) cannot be killed")


def _kill_on(hosts: Sequence[Host], ssh: Sequence[str], named: Sequence[str]) -> int:
    """Kill what jobs have left on hosts, side by side."""
    words = shlex.join(["-m", "paceline", "kill", "--here", *named])
    search = f'for p in {shlex.quote(sys.executable)} python3; do command -v "$p" >/dev/null && exec "$p" {words}; done'
    path = os.environ.get("PYTHONPATH", "")
    script = f"PYTHONPATH={shlex.quote(path)}; export PYTHONPATH; {search}"
    running = {
        host.name: subprocess.Popen(
            [*ssh_command(ssh, host), host.name, shlex.join(["sh", "-c", script])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in hosts
    }
    code = 0
    for name, process in running.items():
        lines = process.communicate()[0].strip().splitlines()
        code = code or process.returncode
        print(f"{name}: {lines[-1] if lines else 'no word'}")
    return 1 if code else 0
