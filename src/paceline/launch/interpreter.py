"""Which Python ``python`` of the workers' command is: the one that runs paceline on their host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import LaunchError

#: Words that stand for the interpreter of paceline, unless the user gives the workers a PATH.
_WORDS = frozenset({"python", "python3"})

#: Folders of the system: put first, they would hide programs that the user's PATH has before them.
_OF_SYSTEM = frozenset({"/usr/bin", "/bin", "/usr/local/bin"})

#: Prints whether ``import torch`` loads paceline in an interpreter, without importing either.
_PROBE = """
from importlib import metadata
print(any(one.value.startswith("paceline.") for one in metadata.entry_points(group="torch.backends")))
"""
#: How long an interpreter may take to answer. One that does not is started anyway. An agent that waits sends no pongs.
_PROBE_S = 30.0


def own_python(command: Sequence[str], python: str) -> tuple[str, ...]:
    """Return a command whose first word is the path of the interpreter ``python``, where it is that word. Pure."""
    return (python, *command[1:]) if command[0] in _WORDS else tuple(command)


def with_own_folder(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for scripts that call ``python``: this interpreter's folder is the first of the PATH.

    So it is in an active virtual environment or conda environment; this one may run by its path alone.
    """
    folder, path = os.path.dirname(sys.executable), environ.get("PATH", os.defpath)
    if folder in _OF_SYSTEM or not folder:
        return dict(environ)
    return {**environ, "PATH": os.pathsep.join([folder, *(one for one in path.split(os.pathsep) if one != folder)])}


def other_python(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the path of another interpreter that a shell would start for a command's ``python``; empty: it has none.

    A script of that name (pyenv's) chooses an interpreter by rules of its own, and is not named.
    """
    found = shutil.which(command[0], path=environ.get("PATH", os.defpath)) if command[0] in _WORDS else None
    if found is None or _identity(found) == _identity(sys.executable):
        return ""
    with open(found, "rb") as file:
        return "" if file.read(2) == b"#!" else found


def _identity(python: str) -> tuple[str, str]:
    """Return the program behind an interpreter's path, and the virtual environment that the path makes it use."""
    folder = Path(python).absolute().parent
    is_virtual = (folder.parent / "pyvenv.cfg").is_file()
    return os.path.realpath(python), os.path.realpath(folder) if is_virtual else ""


def check_ddp(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Make sure that the Python of a host's first worker loads paceline with torch, if the job has ``--ddp``.

    What another command starts is not known here: the job fails at its end if no worker has joined.

    Raises:
        LaunchError: it does not; the message names it and the launcher's.
    """
    is_first = "PACELINE_DDP" in environ and environ.get("PACELINE_LOCAL_RANK") == "0"
    if not is_first or not Path(command[0]).name.startswith("python"):
        return
    found = shutil.which(command[0], path=environ.get("PATH", os.defpath)) or command[0]
    if not (_loads_here() if _identity(found) == _identity(sys.executable) else _loads(found, environ)):
        raise LaunchError(
            f"--ddp would have no effect: {found} has no paceline installed, which is what runs the workers, and "
            f"{sys.executable} runs the launcher; write python in the command to use that one, or install paceline "
            f"for the other: {found} -m pip install paceline"
        )


def _loads_here() -> bool:
    from importlib import metadata  # with email and zipfile: only a job of --ddp pays for it

    return any(one.value.startswith("paceline.") for one in metadata.entry_points(group="torch.backends"))


def _loads(python: str, environ: Mapping[str, str]) -> bool:
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return True  # its own start says what is wrong
    return done.stdout.strip() == b"True"
