"""One script runs under every launcher; many starts and ends leave no process hanging."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import programs
from tests.hvd.ranks import LONG

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "hvd_mnist.py"
BIN = Path(sys.executable).parent
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
HVDRUN = [sys.executable, "-m", "paceline", "hvdrun", "-np", "2", "-H", "localhost:2", "--fusion-threshold-mb", "2",
          "--disable-cache", "--no-stall-check"]  # fmt: skip
LAUNCHERS = {
    "launch": [sys.executable, "-m", "paceline", "launch", "-n", "2", "-s", "1", "--", sys.executable],
    "hvdrun": [*HVDRUN, sys.executable],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2"],
    "mpirun": MPIRUN,
}
every_launcher = pytest.mark.parametrize("launcher", LAUNCHERS)


def output_of(launcher: str, script: Path, *arguments: str) -> str:
    """Return what a job prints."""
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    command = [*LAUNCHERS[launcher], str(script), *arguments]
    if command[0] == sys.executable:
        done = programs.run(command[1:], timeout_s=150)
    else:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


#: As Horovod's documentation has it, but for the line that prints what a flag of hvdrun sets.
FOR_HOROVOD = """
import os
import torch
import horovod.torch as hvd

hvd.init()
print(f"fusion {os.environ.get('HOROVOD_FUSION_THRESHOLD')}", flush=True)
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
x = torch.randn(16, 4)
for step in range(60):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    if step % 59 == 0:
        print(f"loss {hvd.allreduce(loss.detach(), name='loss').item():.6f}", flush=True)
print(f"rank {hvd.rank()} of {hvd.size()}, here {hvd.local_rank()} of {hvd.local_size()}", flush=True)
print(f"weights {sum(param.sum().item() for param in model.parameters()):.6f}", flush=True)
"""


@every_launcher
def test_script_for_horovod_runs_with_only_its_import_changed(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(FOR_HOROVOD.replace("import horovod.torch as hvd", "import paceline.hvd as hvd"))
    monkeypatch.chdir(tmp_path)
    found = output_of(launcher, Path(script.name))  # launchers may put two ranks' lines on one
    losses = sorted(map(float, re.findall(r"loss (\d+\.\d{6})", found)))
    assert len(losses) == 4, found
    assert losses[::2] == losses[1::2], "both ranks have the same means"
    assert losses[0] < 0.3 * losses[3]
    ranks = re.findall(r"rank \d of \d, here \d of \d", found)
    assert sorted(ranks) == ["rank 0 of 2, here 0 of 2", "rank 1 of 2, here 1 of 2"]
    assert found.count(f"fusion {2 * 1024 * 1024 if launcher == 'hvdrun' else None}") == 2
    weights = re.findall(r"weights (-?\d+\.\d{6})", found)
    assert len(weights) == 2, found
    assert weights[0] == weights[1]


@pytest.mark.skipif(not LONG, reason="nox -s hvd runs it")
@every_launcher
def test_example_learns_under_every_launcher(launcher: str) -> None:
    pytest.importorskip("sklearn")
    found = output_of(launcher, ROOT / "examples" / "hvd_mnist.py", "--epochs", "4", "--lr", "0.03")
    accuracies = [float(one) for one in re.findall(r"accuracy ([\d.]+)", found)]
    assert len(accuracies) == 4, found
    assert accuracies[-1] > 0.85


#: Starts jobs one after the other. Ranks are forked after the imports, which take most of a start; then each of them
#: ends as an interpreter does. To look for garbage in what was imported before would take most of each end.
STARTS = """
import gc, os, sys, time
import torch
import paceline.hvd as hvd

def start(job, shared_memory):
    children = {}
    for rank in range(2):
        pid = os.fork()
        if not pid:
            os.environ.update(RANK=str(rank), PACELINE_JOB_ID=job, PACELINE_SHARED_MEMORY=shared_memory)
            hvd.init()
            assert hvd.allreduce(torch.ones(1000), name="x", op=hvd.Sum)[0] == 2
            sys.exit(0)
        children[pid] = rank
    deadline = time.monotonic() + 60
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid and status:
            sys.exit(f"{job}: rank {children[pid]} ended with {status}")
        children.pop(pid, None)
        if time.monotonic() > deadline:
            sys.exit(f"{job}: ranks {sorted(children.values())} hang")
        time.sleep(0.002)

folder, count = sys.argv[1], int(sys.argv[2])
gc.freeze()
for number in range(count):
    start(f"{folder} shared memory {number}", "1")
    start(f"{folder} gloo {number}", "0")
print("all ended")
"""


def test_processes_end(tmp_path: Path) -> None:
    """With shared memory, and with groups of Gloo, whose threads once waited for the interpreter's lock at the end."""
    (tmp_path / "starts.py").write_text(STARTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "HOROVOD_"))}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    count = os.environ.get("PACELINE_TEST_ENDS", "2")
    command = [sys.executable, str(tmp_path / "starts.py"), str(tmp_path), count]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all ended" in done.stdout
