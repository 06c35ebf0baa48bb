"""train_mnist.py with several logical CPU devices."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import programs

ROOT = Path(__file__).parents[2]
LAUNCH = ("-m", "paceline", "launch", "-n", "2", "-s", "1", "--", sys.executable)


def train(folder: Path, *arguments: object, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    file = folder / "result.json"
    script = [ROOT / "examples" / "train_mnist.py", "--network", "mlp", "--result", file, *arguments]
    done = programs.run([*launcher, *script], timeout_s=300)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("one"), *FIXED)["accuracy"]


# 3 batches of 479 samples are all there are: none is left over.
FIXED = ("--batch-size", 479, "--num-epochs", 10, "--lr", 0.1)


@pytest.mark.parametrize("store", ["local", "device"])
def test_two_devices_learn_what_one_learns(tmp_path: Path, on_one_device: list[float], store: str) -> None:
    result = train(tmp_path, *FIXED, "--cpus", 2, "--kv-store", store)
    assert result["accuracy"] == pytest.approx(on_one_device, abs=0.01), "rounding may turn a sample or two"
    assert result["accuracy"][-1] > result["accuracy"][0] + 0.2
    assert (result["kv_store"], result["devices"]) == (store, "cpu(0), cpu(1)")


# Without lock step worker 0 may be done when worker 1 has just begun, and then it has learned from its own half only.
@pytest.mark.parametrize(("store", "epochs"), [("dist_sync", 6), ("dist_async", 12)])
def test_two_workers_with_two_devices_each_learn(tmp_path: Path, store: str, epochs: int) -> None:
    result = train(tmp_path, "--cpus", 2, "--kv-store", store, "--num-epochs", epochs, launcher=LAUNCH)
    assert result["accuracy"][-1] >= 0.9
    assert (result["num_workers"], result["devices"]) == (2, "cpu(0), cpu(1)")


def test_threshold_of_two_bits_means_the_same_with_several_devices(tmp_path: Path) -> None:
    result = train(tmp_path, "--cpus", 2, "--kv-store", "device", "--gc-type", "2bit")
    assert result["accuracy"][-1] >= 0.95
