"""A job that is killed at a random step goes on from its last checkpoint, with as many workers or another number."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.examples import scripts

EPOCHS, STEPS = 3, 5
TRAINING = f"--network 3conv --num-epochs {EPOCHS} --lr 0.01 --disp-batches 1 --kv-store dist_sync --savemodel"


def command(workers: int, data: Path, *flags: str) -> list[str]:
    """Return the line of a job; the batches of all workers together have 12 samples."""
    launch = [sys.executable, "-m", "paceline", "launch", "-n", str(workers), "-s", "1", "--", sys.executable]
    own = ["--data-dir", str(data), "--num-examples", str(12 * STEPS), "--batch-size", str(12 // workers)]
    return [*launch, str(scripts.EXAMPLES / "train_cifar10.py"), *TRAINING.split(), *own, *flags]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def finish(folder: Path, workers: int, data: Path, *flags: str) -> str:
    line = command(workers, data, *flags)
    done = subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kill_at(folder: Path, data: Path, epoch: int, step: int) -> None:
    """Start a job of two workers; kill all of its processes with signal 9 when it has printed a step."""
    line = command(2, data)
    with subprocess.Popen(line, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert any(f"epoch {epoch} batch {step}/{STEPS}:" in text for text in job.stdout)
        root = psutil.Process(job.pid)
        for process in [*root.children(recursive=True), root]:
            process.kill()


def tensors(folder: Path) -> dict[str, bytes]:
    """Return the tensors of the last checkpoint: weights, buffers and the optimizer's state.

    Random numbers of Python and NumPy are left out: the scripts draw none from them, and give them no seed.
    """
    found = load_file(folder / "models" / f"3conv-{EPOCHS:04d}.ckpt")
    return {
        name: one.numpy().tobytes()
        for name, one in found.items()
        if "/rng/numpy" not in name and "/rng/python" not in name
    }


def last_loss(output: str) -> float:
    found = re.search(rf"epoch {EPOCHS - 1}: .*loss ([0-9.]+)", output)
    assert found is not None, output
    return float(found[1])


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not os.environ.get("PACELINE_TEST_EXAMPLES"), reason="several jobs: nox -s examples")
@pytest.mark.parametrize("workers", [2, 1, 3])
def test_job_of_two_killed_at_a_random_step_goes_on(tmp_path: Path, workers: int) -> None:
    epoch, step = random.randrange(1, EPOCHS), random.randrange(1, STEPS + 1)
    print(f"killed in epoch {epoch} at step {step}")
    data, killed, whole = (tmp_path / name for name in ("data", "killed", "whole"))
    for folder in (data, killed, whole):
        folder.mkdir()
    scripts.module("make_data").make_cifar(data, fine=False)
    kill_at(killed, data, epoch, step)
    output = finish(killed, workers, data, "--retrain")
    resumed = re.search(r"goes on after epoch (\d+), step (\d+)", output)
    assert resumed is not None, output
    done = int(resumed[1])
    assert done in (epoch, epoch + 1)  # the last step of an epoch is printed before its checkpoint is written
    assert int(resumed[2]) == done * STEPS
    assert last_loss(output) < 3  # ten classes: by chance 2.3
    if workers == 2:
        finish(whole, 2, data)
        assert tensors(killed) == tensors(whole)
