"""``hvd.run``: runs a function on several ranks of this host, each a process of its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.hvd.objects import dumps


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    env: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> list[Any]:
    """Return what a function returns on each rank, in their order.

    The function, its arguments and its result are pickled, through a folder that only this user can read. Each process
    runs under ``paceline launch``.

    Args:
        func: calls ``hvd.init()`` itself.
        args: its arguments.
        kwargs: its arguments by name.
        num_proc: number of ranks, all on this host.
        np: Horovod's older name of ``num_proc``.
        env: variables of the processes; by default those of this process.
        verbose: print what the processes print.

    Raises:
        ValueError: the number of ranks is less than 1.
        LaunchError: a process failed; the text has the end of the output.
    """
    count = num_proc if np is None else np
    if count < 1:
        raise ValueError(f"num_proc is {count}; it must be at least 1")
    with tempfile.TemporaryDirectory(prefix="paceline-hvd-run-") as name:
        folder = Path(name)
        (folder / "function").write_bytes(dumps((func, tuple(args), dict(kwargs or {}))))
        launch = [sys.executable, "-m", "paceline", "launch", "-n", str(count), "-s", "0", "--"]
        command = [*launch, sys.executable, "-m", "paceline.hvd.task", name]
        environment = dict(os.environ if env is None else env)
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if verbose:
            sys.stdout.write(done.stdout)
            sys.stderr.write(done.stderr)
        if done.returncode:
            end = (done.stdout + done.stderr)[-4000:]
            raise LaunchError(
                "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
                f"terminated (exit code {done.returncode}). The end of the output:\n{end}"
            )
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(count)]
