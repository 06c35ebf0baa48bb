"""Copy the launcher's directory to every host with rsync."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence

from paceline.errors import LaunchError
from paceline.launch.hosts import Host
from paceline.launch.supervise.child import die_with_parent

#: What never belongs to a copy.
_EXCLUDED = ("__pycache__", ".git", ".venv", "*.pyc")


def rsync_command(ssh: Sequence[str], host: Host, directory: str) -> list[str]:
    """Return the command that copies the working directory to a host; nothing there is deleted."""
    excluded = [f"--exclude={name}" for name in _EXCLUDED]
    name = f"[{host.name}]" if ":" in host.name else host.name
    return ["rsync", "-az", "--mkpath", *excluded, "-e", shlex.join(ssh), "./", f"{name}:{directory}/"]


def check_rsync() -> None:
    """Make sure that rsync exists here.

    Raises:
        LaunchError: it does not.
    """
    if shutil.which("rsync") is None:
        raise LaunchError("--sync-dst-dir needs the program 'rsync' here and on every host; install the package rsync")


def run_all(commands: Mapping[str, Sequence[str]]) -> None:
    """Run one command per host, side by side.

    Raises:
        LaunchError: a command failed; the message names all such hosts.
    """
    running = {
        host: subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - the launcher has one thread
        )
        for host, command in commands.items()
    }
    failed = []
    try:
        for host, process in running.items():
            errors = process.communicate()[1].decode(errors="replace")
            if process.returncode:
                failed.append(f"host {host}: {_why(errors, process.returncode)}")
    except BaseException:  # a signal has ended the launch
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        raise
    if failed:
        raise LaunchError(f"the directory could not be copied: {'; '.join(failed)}")


def _why(errors: str, code: int) -> str:
    if "rsync: command not found" in errors or "rsync: not found" in errors or code == 127:
        return "the program 'rsync' is missing there; install the package rsync"
    lines = [line for line in errors.splitlines() if line.strip() and not line.startswith("rsync error")]
    return f"{lines[-1] if lines else 'no word'} (exit code {code})"
