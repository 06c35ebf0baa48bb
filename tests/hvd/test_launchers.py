"""One script runs under every launcher; many starts and ends leave no process hanging."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "hvd_mnist.py"
BIN = Path(sys.executable).parent
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]


@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable, "-m", "paceline", "launch", "-n", "2", "--", sys.executable],
        [sys.executable, "-m", "paceline", "hvdrun", "-np", "2", sys.executable],
        [str(BIN / "torchrun"), "--nproc-per-node", "2"],
        pytest.param(MPIRUN, marks=pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")),
    ],
    ids=["launch", "hvdrun", "torchrun", "mpirun"],
)
def test_script_learns_under_every_launcher(launcher: list[str]) -> None:
    pytest.importorskip("sklearn")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(SCRIPT), "--epochs", "4", "--lr", "0.03"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = [float(one) for one in re.findall(r"accuracy ([\d.]+)", done.stdout)]
    assert len(accuracies) == 4, done.stdout
    assert accuracies[-1] > 0.85


BRIEF = """
import torch
import paceline.hvd as hvd
hvd.init()
hvd.allreduce(torch.ones(1000), name="x")
"""


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["1", "0"])
def test_processes_end(shared: str, tmp_path: Path) -> None:
    """Also those with groups of Gloo, whose threads once waited for the interpreter's lock at the end."""
    (tmp_path / "brief.py").write_text(BRIEF)
    for number in range(int(os.environ.get("PACELINE_TEST_ENDS", "3"))):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PACELINE_SHARED_MEMORY": shared}
        environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PACELINE_JOB_ID": f"{tmp_path}{number}"}
        ranks = [
            subprocess.Popen([sys.executable, tmp_path / "brief.py"], env=environment | {"RANK": str(rank)})
            for rank in range(2)
        ]
        assert [one.wait(60) for one in ranks] == [0, 0]
