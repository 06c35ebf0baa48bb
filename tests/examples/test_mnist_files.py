import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.readers import MNIST, DataError

NUM_SAMPLES = 7


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, 28, 28), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, pixels: np.ndarray) -> Path:
    labels = np.arange(NUM_SAMPLES, dtype=np.uint8)
    for prefix, shift in (("train", 0), ("t10k", 1)):
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(idx(pixels))
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels + shift))
    return tmp_path


def test_images_are_scaled_and_labels_are_class_indices(folder: Path, pixels: np.ndarray) -> None:
    images, labels = MNIST(folder).tensors
    assert (images.shape, images.dtype, labels.dtype) == ((NUM_SAMPLES, 1, 28, 28), torch.float32, torch.int64)
    assert torch.equal(images[:, 0], torch.from_numpy(pixels) / 255)
    assert labels.tolist() == list(range(7))
    assert MNIST(folder, train=False).tensors[1].tolist() == list(range(1, 8))


@pytest.mark.parametrize("subfolder", ["", "MNIST/raw"])
def test_packed_files_and_the_folder_of_torchvision_are_found(folder: Path, tmp_path: Path, subfolder: str) -> None:
    home = tmp_path / "elsewhere" / subfolder
    home.mkdir(parents=True)
    for path in folder.glob("*ubyte"):
        (home / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert torch.equal(MNIST(tmp_path / "elsewhere").tensors[0], MNIST(folder).tensors[0])


def test_missing_files_end_in_advice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"train-images-idx3-ubyte is not in {tmp_path}: put MNIST's four files"):
        MNIST(tmp_path)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("images-idx3", lambda data: data[:-1], "bytes do not hold 7 x 28 x 28 values"),
        ("images-idx3", lambda data: data[:6], "ends in its header, after 6 bytes"),
        ("images-idx3", lambda data: b"", "begins with nothing"),
        ("images-idx3", lambda data: b"<!DOCTYPE html>", "begins with 3c21444f, not 00000803"),
        ("images-idx3", lambda data: idx(np.zeros((7, 28, 27), np.uint8)), "28x27, not 28x28"),
        ("images-idx3", lambda data: struct.pack(">4B3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "do not hold"),
        ("labels-idx1", lambda data: idx(np.zeros(6, np.uint8)), "has 6 labels for 7 images"),
        ("labels-idx1", lambda data: idx(np.full(7, 10, np.uint8)), "label 10 of sample 0 is not 0 to 9"),
    ],
)
def test_damaged_file_is_named(folder: Path, name: str, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    path = folder / f"train-{name}-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=rf"train-{name}-ubyte.*{message}"):
        MNIST(folder)


def test_damaged_packed_file_is_named(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte"
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    path.with_suffix(".gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"ubyte.gz cannot be read"):
        MNIST(folder)
