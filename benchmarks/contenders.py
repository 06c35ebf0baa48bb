"""Whole jobs to measure: paceline and its peers, each a set of processes whose worker 0 prints one JSON line."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.host.cores import share_of

HERE = Path(__file__).parent
TIMEOUT_S = 300.0
#: Threads of every worker of every contender; servers share the machine by paceline's rule.
WORKER_THREADS = 1


@dataclass(frozen=True)
class Work:
    """What is measured: keys, sizes of the job, optimizer and codec."""

    shapes: str
    workers: int = 1
    servers: int = 1
    optimizer: str = "sgd"
    codec: str = "none"
    steps: int = 20

    def arguments(self) -> list[str]:
        """Return the arguments of a worker script."""
        return [self.shapes, self.optimizer, self.codec, str(self.steps)]


def run(contender: str, work: Work) -> dict[str, Any]:
    """Run one job; returns what its worker 0 measured.

    Args:
        contender: ``shm``, ``arena`` (shared memory, gradients born in the arena), ``unix``, ``tcp``, ``tcp-arena``,
            ``tcp-encrypted``, ``mxnet`` or ``gloo``.
        work: what to measure.

    Raises:
        ValueError: unknown contender.
        RuntimeError: the job failed; with its output.
    """
    if contender == "mxnet":
        return _mxnet(work)
    if contender == "gloo":
        return _gloo(work)
    if contender not in _PACELINE:
        raise ValueError(f"unknown contender {contender!r}; known are {', '.join([*_PACELINE, 'mxnet', 'gloo'])}")
    return _paceline(work, contender)


_PACELINE: dict[str, dict[str, str]] = {
    "shm": {},
    "arena": {"BENCHMARK_ARENA": "1"},
    "unix": {"PACELINE_SHARED_MEMORY": "0", "PACELINE_ENCRYPT": "0"},
    "tcp": {"PACELINE_SHARED_MEMORY": "0", "PACELINE_UNIX_SOCKETS": "0", "PACELINE_ENCRYPT": "0"},
    "tcp-arena": {
        "PACELINE_SHARED_MEMORY": "0", "PACELINE_UNIX_SOCKETS": "0", "PACELINE_ENCRYPT": "0", "BENCHMARK_ARENA": "1",
    },
    "tcp-encrypted": {"PACELINE_SHARED_MEMORY": "0", "PACELINE_UNIX_SOCKETS": "0"},
}  # fmt: skip


def _paceline(work: Work, contender: str) -> dict[str, Any]:
    return launched("paceline_worker.py", work.arguments(), work.workers, work.servers, _PACELINE[contender])


def _gloo(work: Work) -> dict[str, Any]:
    return together("gloo_worker.py", work.arguments(), work.workers)


def launched(
    script: str, arguments: Sequence[str], workers: int, servers: int, extra: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:  # fmt: skip
    """Run a worker script under ``paceline launch``; returns what its worker 0 printed."""
    launch = [sys.executable, "-m", "paceline", "launch", "-n", str(workers), "-s", str(servers), "--"]
    command = [*launch, sys.executable, str(HERE / "workers" / script), *arguments]
    return _result(_output(command, extra, timeout_s), script)


def together(script: str, arguments: Sequence[str], workers: int) -> dict[str, Any]:
    """Run a worker script in as many processes as torchrun would; returns what its rank 0 printed."""
    command = [sys.executable, str(HERE / "workers" / script), *arguments]
    job = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return _result(_together([(command, job | {"RANK": str(rank)}) for rank in range(workers)]), script)


def _mxnet(work: Work) -> dict[str, Any]:
    """Run MXNet 1.9.1 from a virtual environment of its own; its numpy must be older than ours."""
    python = str(mxnet_python())
    job = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(_free_port()),
        "DMLC_NUM_WORKER": str(work.workers),
        "DMLC_NUM_SERVER": str(work.servers),
        "PYTHONWARNINGS": "ignore",
    }
    script = [python, str(HERE / "workers" / "mxnet_worker.py"), *work.arguments()]
    own = {"OMP_NUM_THREADS": str(share_of(len(os.sched_getaffinity(0)), work.workers + work.servers))}
    servers = [(script, job | own | {"DMLC_ROLE": role}) for role in ["scheduler", *["server"] * work.servers]]
    return _result(_together([*servers, *[(script, job | {"DMLC_ROLE": "worker"})] * work.workers]), "mxnet")


def mxnet_python() -> Path:
    """Return the interpreter that has MXNet, installing it at the first call."""
    home = Path(os.environ.get("BENCHMARK_MXNET_VENV", Path(tempfile.gettempdir()) / "paceline-benchmark-mxnet"))
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True)
        packages = ["mxnet==1.9.1", "numpy==1.23.5"]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True, timeout=TIMEOUT_S)
        (home / "ready").touch()
    return python


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not re.match("PACELINE_|DMLC_", name)}
    here = f"{HERE.parent}{os.pathsep}{HERE.parent / 'src'}"  # this copy of the project, whichever is installed
    return clean | {"PYTHONPATH": here, "OMP_NUM_THREADS": str(WORKER_THREADS)} | dict(extra)


def _output(command: Sequence[str], extra: Mapping[str, str], timeout_s: float) -> str:
    done = subprocess.run(
        command, env=_environment(extra), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _together(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> str:
    """Run processes until the last of them, a worker, ends; returns all output."""
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen(command, env=_environment(env), stdout=output, stderr=subprocess.STDOUT)
            for command, env in commands
        ]
        try:
            code = processes[-1].wait(TIMEOUT_S)
            for process in processes:
                process.wait(30)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read()
    if code:
        raise RuntimeError(f"{commands[-1][0]} failed with {code}:\n{text}")
    return text


def _result(output: str, contender: str) -> dict[str, Any]:
    found = re.findall(r"\{.*\}", output)
    if not found:
        raise RuntimeError(f"{contender} printed no result:\n{output}")
    result: dict[str, Any] = json.loads(found[-1])
    return result


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
