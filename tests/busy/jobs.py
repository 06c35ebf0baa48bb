"""The jobs that must end with 0 however busy the machine is."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline
from tests.clusters.ssh import SshHosts
from tests.engines.small_jobs import write_training

ROOT = Path(paceline.__file__).parents[2]
_MNIST = str(ROOT / "examples/train_mnist.py")

#: Far more than any job takes at the load that the tool makes: a job that takes longer hangs.
LIMIT_S = 1800.0

#: Keeps ssh itself from judging a slow machine.
_PATIENT_SSH = "-o ConnectTimeout=120 -o ServerAliveInterval=30 -o ServerAliveCountMax=10"


@dataclass(frozen=True)
class Kind:
    """A kind of job.

    Attributes:
        name: for tables.
        words: of ``paceline launch``.
        over_ssh: it runs on two hosts.
    """

    name: str
    words: tuple[str, ...]
    over_ssh: bool = False


@dataclass(frozen=True)
class Result:
    """How a job ended: ``code`` is None where it hung."""

    kind: str
    code: int | None
    seconds: float
    output: str


def kinds(folder: Path, with_ssh: bool) -> list[Kind]:
    """Return the kinds of jobs; their scripts are written into a folder."""
    script = folder / "readme.py"
    (first, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    script.write_text(first)
    python = sys.executable
    demo = ("--network", "lenet", "--kv-store", "dist_sync", "--lr", "0.05")
    small = ("--network", "mlp", "--num-epochs", "1", "--kv-store", "dist_sync")
    found = [
        Kind("README's script", ("-n", "2", "-s", "1", "--", python, str(script))),
        Kind("demo", ("-n", "2", "-s", "2", "--", python, _MNIST, *demo)),
        Kind("-n 4 -s 2", ("-n", "4", "-s", "2", "--", python, _MNIST, *small)),
    ]
    if with_ssh:
        training = write_training(folder)
        found.append(Kind("ssh, two hosts", ("-n", "2", "-s", "2", "--", python, training), over_ssh=True))
    return found


def run(kind: Kind, folder: Path, cluster: SshHosts | None) -> Result:
    """Run one job."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "paceline", "launch"]
    if kind.over_ssh:
        assert cluster is not None
        ssh = f"ssh -F {cluster.client_config} {_PATIENT_SSH}"
        hostfile = cluster.hostfile(["h0", "h1"], folder.name)
        command = cluster.command([*command, "-H", hostfile, "-o", f"ssh={ssh}", *kind.words])
    else:
        command += kind.words
    env = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with open(folder / "output", "wb") as output:
        code = _wait(command, folder, env, output.fileno())
    return Result(kind.name, code, time.monotonic() - began, (folder / "output").read_text(errors="replace"))


def _wait(command: Sequence[str], folder: Path, env: dict[str, str], output: int) -> int | None:
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # its guardian ends what it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
