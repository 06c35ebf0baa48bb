from pathlib import Path

import numpy as np
import pytest
import torch

from examples.readers import CIFAR10, CIFAR100, DataError


def records(labels: list[list[int]]) -> bytes:
    heads = np.array(labels, dtype=np.uint8)
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return np.concatenate([heads, pixels], axis=1).tobytes()


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(records([[number], [number + 1]]))
    (tmp_path / "test_batch.bin").write_bytes(records([[9]]))
    return tmp_path


def test_training_files_are_joined_in_order(cifar10: Path) -> None:
    images, labels = CIFAR10(cifar10).tensors
    assert (images.shape, images.dtype, labels.dtype) == ((10, 3, 32, 32), torch.float32, torch.int64)
    assert labels.tolist() == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert CIFAR10(cifar10, train=False).tensors[1].tolist() == [9]


def test_pixels_are_red_green_and_blue_planes_scaled_to_one(cifar10: Path) -> None:
    raw = np.frombuffer((cifar10 / "test_batch.bin").read_bytes()[1:], np.uint8).reshape(3, 32, 32)
    assert torch.equal(CIFAR10(cifar10, train=False).tensors[0][0], torch.from_numpy(raw.copy()) / 255)


def test_extracted_archive_is_found(cifar10: Path) -> None:
    folder = cifar10 / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for path in cifar10.glob("*.bin"):
        path.rename(folder / path.name)
    assert len(CIFAR10(cifar10 / "data").shard(3, 0)) == 4


def test_fine_and_coarse_labels_of_cifar100(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(records([[19, 99], [0, 20]]))
    assert CIFAR100(tmp_path).tensors[1].tolist() == [99, 20]
    assert CIFAR100(tmp_path, coarse=True).tensors[1].tolist() == [19, 0]


def test_missing_files_end_in_advice(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"data_batch_1.bin is not in {tmp_path}: extract .*cifar-10-binary.tar.gz there"
    ):
        CIFAR10(tmp_path)
    with pytest.raises(DataError, match=r"test.bin is not in .*cifar-100-binary.tar.gz there"):
        CIFAR100(tmp_path, train=False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (records([[1], [2]])[:-5], "6141 bytes are not whole records of 3073 bytes"),
        (b"", "0 bytes are not whole records"),
        (records([[1], [10]]), "label 10 of sample 1 is not 0 to 9"),
    ],
)
def test_damaged_file_is_named(cifar10: Path, data: bytes, message: str) -> None:
    (cifar10 / "data_batch_3.bin").write_bytes(data)
    with pytest.raises(DataError, match=rf"data_batch_3.bin is damaged: {message}"):
        CIFAR10(cifar10)
