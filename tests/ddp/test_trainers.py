"""Trainers of others under ``paceline launch --ddp``: the weights of ``torchrun`` with Gloo, bit for bit.

``nox -s trainers`` runs them in a venv of its own, with transformers and accelerate too.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parent / "trainers"
LAUNCH = [sys.executable, "-m", "paceline", "launch", "--quiet", "--ddp", "-n", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

#: The trainers, and what they need.
TRAINERS = {
    "mnist.py": "torch", "imagenet.py": "torch", "imagenet.py --multiprocessing-distributed": "torch",
    "gpt.py": "torch", "accelerate_loop.py": "accelerate", "transformers_trainer.py": "transformers",
    "lightning_trainer.py": "lightning",
}  # fmt: skip

pytestmark = pytest.mark.skipif("PACELINE_TEST_TRAINERS" not in os.environ, reason="nox -s trainers: some minutes")


def weights(command: list[str], path: Path) -> dict[str, torch.Tensor]:
    """Train; returns the weights."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("PACELINE_")}
    env["OMP_NUM_THREADS"] = "1"  # as torchrun sets it: more threads round in another way
    done = subprocess.run(
        [*command, str(path)],
        env=env | {"HF_HUB_OFFLINE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(torch.load(path))


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name, value in theirs.items() if not torch.equal(ours[name], value)]


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_has_the_weights_of_gloo(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(TRAINERS[name]) is None:
        pytest.skip(f"{TRAINERS[name]} is not installed")
    script, *flags = name.split()
    command = [str(SCRIPTS / script), *flags]
    ours = weights([*LAUNCH, "--", *command], tmp_path / "ours.pt")
    assert not differing(ours, weights([*TORCHRUN, *command], tmp_path / "theirs.pt"))


@pytest.mark.parametrize("name", ["gpt.py", "lightning_trainer.py --double"])
def test_measured_shares_train_as_equal_ones(name: str, tmp_path: Path) -> None:
    """Means over samples, or over sequences of equal length: any shares give the weights of equal ones."""
    script, *flags = name.split()
    command = [str(SCRIPTS / script), *flags]
    ours = weights([*LAUNCH, "--shares", "measured", "--", *command], tmp_path / "ours.pt")
    theirs = weights([*TORCHRUN, *command], tmp_path / "theirs.pt")
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-7, atol=1e-9)
