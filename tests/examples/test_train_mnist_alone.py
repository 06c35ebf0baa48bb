import gzip
import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clusters import programs

SCRIPT = Path(__file__).parents[2] / "examples" / "train_mnist.py"


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    return programs.run([SCRIPT, *arguments], env={"COLUMNS": "100"}, timeout_s=170)


def train(folder: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    file = folder / "result.json"
    done = run_script("--result", file, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def write_idx(path: Path, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def test_lenet_learns_the_digits_and_reports_it(tmp_path: Path) -> None:
    result, output = train(tmp_path, "--optimizer", "adam", "--batch-size", 32, "--num-epochs", 6)
    assert max(result["accuracy"][-2:]) >= 0.97
    assert len(result["accuracy"]) == output.count("samples/s per worker") == 6
    assert (result["network"], result["kv_store"], result["num_workers"]) == ("lenet", "local", 1)
    assert result["samples_per_s"] == pytest.approx(6 * 1437 / result["seconds"], rel=0.01)
    assert "Trained lenet" in output


def test_rate_is_multiplied_after_epochs_and_only_some_examples_are_read(tmp_path: Path) -> None:
    few = ("--network", "mlp", "--num-examples", 320, "--num-epochs", 3, "--mom", 0.9, "--wd", 1e-4)
    result, _ = train(tmp_path, *few, "--lr-factor", 0, "--lr-factor-epoch", 1)
    assert result["accuracy"][0] > 0.2
    assert result["accuracy"][1:] == result["accuracy"][:1] * 2, "a rate of 0 changes nothing"
    assert result["seconds"] == pytest.approx(3 * 320 / result["samples_per_s"], abs=0.001), "three digits"


def test_two_bits_per_gradient_are_enough_with_the_default_threshold(tmp_path: Path) -> None:
    few = ("--lr", 0.05, "--num-epochs", 7)
    result, _ = train(tmp_path, "--network", "mlp", "--kv-store", "device", "--gc-type", "2bit", *few)
    assert result["gc_type"] == "2bit"
    assert max(result["accuracy"][-2:]) >= 0.95


def test_mnist_is_read_where_data_dir_points(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", pixels)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", np.arange(40, dtype=np.uint8) % 10)
    result, _ = train(tmp_path, "--network", "mlp", "--num-epochs", 60, "--lr", 0.1, "--data-dir", tmp_path)
    assert result["accuracy"][-1] == 1.0, "a network of this size learns 40 samples by heart"


def test_missing_data_set_ends_the_run_with_advice(tmp_path: Path) -> None:
    done = run_script("--data-dir", tmp_path)
    assert done.returncode != 0
    assert f"train-images-idx3-ubyte is not in {tmp_path}: put MNIST's four files" in done.stderr
