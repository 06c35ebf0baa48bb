"""``hvd.run``: runs a function on several ranks of this host, each a process of its own."""

from __future__ import annotations

import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError, MissingExtraError
from paceline.hvd.functions import dumps

#: Arguments of Horovod that only ``hvd.elastic`` has a use for.
_ELASTIC = (
    "min_num_proc",
    "max_num_proc",
    "min_np",
    "max_np",
    "slots",
    "reset_limit",
    "cooldown_range",
    "host_discovery_script",
)
#: Arguments of Horovod that say how other hosts are reached, or whether its checks are cached: nothing on this host.
_NOTHING_HERE = ("ssh_port", "ssh_identity_file", "disable_cache", "network_interface", "network_interfaces")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    env: Mapping[str, str] | None = None,
    verbose: bool | int | None = False,
    hosts: str | None = None,
    hostfile: str | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    start_timeout: float | None = None,
    output_filename: str | None = None,
    executable: str | None = None,
    **others: Any,
) -> list[Any]:
    """Return the results of a function on all ranks, in their order.

    The function, its arguments and its result are pickled, through a folder that only this user can read. Each process
    runs under ``paceline launch``.

    Args:
        func: calls ``hvd.init()`` itself.
        args: its arguments.
        kwargs: its arguments by name.
        num_proc: number of ranks, all on this host.
        np: Horovod's older name of ``num_proc``.
        env: variables of the processes; by default those of this process.
        verbose: print the output of the processes.
        hosts: ``host:slots`` with commas between; only this host.
        hostfile: a file with lines ``host slots=n``; only this host.
        use_gloo: data go by Gloo and shared memory, always.
        use_mpi: must not be set.
        mpi_args: must not be set.
        start_timeout: how many seconds ``hvd.init`` waits for all ranks.
        output_filename: folder for a file per process with all that it prints.
        executable: the Python of the processes; by default this one.
        others: arguments of Horovod for other hosts have no effect on this one; those for elastic jobs must be None.

    Raises:
        ValueError: the number of ranks is less than 1, or an argument asks for other hosts, MPI or an elastic job.
        TypeError: an argument that Horovod has not.
        LaunchError: a process failed; the text has the end of the output.
        MissingExtraError: the function is one that the processes cannot import, and cloudpickle is not installed.
    """
    if getattr(func, "__module__", "") == "__main__" and importlib.util.find_spec("cloudpickle") is None:
        raise MissingExtraError(
            f"the processes of hvd.run cannot import {getattr(func, '__name__', func)!r} from the main script: move it "
            "to a module, or pip install 'paceline[hvd]'"
        )
    count = num_proc if np is None else np
    _check_others(others)
    _check_mpi(use_gloo, use_mpi, mpi_args, count)
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile are both given; give one")
    _check_slots(_slots(hosts, hostfile), count)
    options = ["-n", str(count), "-s", "0"]
    options += [] if output_filename is None else ["--log-dir", output_filename]
    environment = dict(os.environ if env is None else env)
    if start_timeout is not None:
        environment["HOROVOD_START_TIMEOUT"] = f"{start_timeout:g}"
    command = [sys.executable, "-P", "-m", "paceline", "launch", *options, "--", executable or sys.executable]
    return _results(command, environment, (func, tuple(args), dict(kwargs or {})), count, bool(verbose))


def _results(command: list[str], environment: Mapping[str, str], call: Any, count: int, verbose: bool) -> list[Any]:
    """Run a call in the processes of a job and return their results."""
    with tempfile.TemporaryDirectory(prefix="paceline-hvd-run-") as name:
        folder = Path(name)
        (folder / "function").write_bytes(dumps(call))
        command = [*command, "-m", "paceline.hvd.task", name]
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


def _check_mpi(use_gloo: bool | None, use_mpi: bool | None, mpi_args: str | None, count: int) -> None:
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi are both set; leave out use_mpi")
    if use_mpi or mpi_args is not None:
        name = "use_mpi" if use_mpi else "mpi_args"
        raise ValueError(
            f"{name} is set, and hvd.run does not use MPI: leave it out, or put the function into a script and start "
            f"that: mpirun -np {count} python train.py"
        )


def _check_others(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in (*_ELASTIC, *_NOTHING_HERE):
            raise TypeError(f"hvd.run has no argument {name!r}")
        if name in _ELASTIC and value is not None:
            raise ValueError(
                f"{name} is for elastic jobs, which are not there: leave it out; a script that is started by paceline "
                "launch --max-restarts starts again after a failure"
            )


def _slots(hosts: str | None, hostfile: str | None) -> list[tuple[str, int]]:
    """Return hosts and their slots."""
    if hostfile is None:
        words = [] if hosts is None else [word.strip() for word in hosts.split(",")]
        pairs = [(name, count) for name, _, count in (word.partition(":") for word in words)]
    else:
        lines = [line.split("#")[0].strip() for line in Path(hostfile).read_text().splitlines()]
        split = [line.partition("slots=") for line in lines if line]
        pairs = [(name.strip(), count.strip()) for name, _, count in split]
    for name, count in pairs:
        if not name or (count and not count.isdigit()):
            raise ValueError(
                f"{hosts or hostfile!r} is not host:slots, as in localhost:2 (in a file: localhost slots=2)"
            )
    return [(name, int(count or 1)) for name, count in pairs]


def _check_slots(slots: Sequence[tuple[str, int]], count: int) -> None:
    if count < 1:
        raise ValueError(f"num_proc is {count}; it must be at least 1")
    here = ("localhost", "127.0.0.1", socket.gethostname())
    away = [name for name, _ in slots if name not in here]
    if away:
        names = ",".join(name for name, _ in slots)
        raise ValueError(
            f"{', '.join(away)} is another host, and hvd.run starts ranks on this one only: put the function into a "
            f"script and start that: paceline launch -n {count} -s 0 -H {names} -- python train.py"
        )
    if slots and count > sum(number for _, number in slots):
        raise ValueError(f"num_proc is {count}, and the hosts have {sum(number for _, number in slots)} slots")
