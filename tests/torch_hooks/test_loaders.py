"""What a loop trains on: which loaders walk all of a data set, which data sets are alike, and which inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from paceline.data import ShardedSampler, batches
from paceline.torch_hooks.loaders import Walk, checksum_of, digest_of, walk_of

SAMPLES = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))


def walk(dataset: Any = SAMPLES, taken: int = 0, **options: Any) -> Walk:
    iterator = iter(DataLoader(dataset, batch_size=4, **options))
    for _ in range(taken):
        next(iterator)
    return walk_of(iterator)


class Stream(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class HalfSampler(data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 20, 2))

    def __len__(self) -> int:
        return 10


class PairSampler(data.BatchSampler):
    """Batches that an own class divides."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "num_workers": 1, "persistent_workers": True},
        {"sampler": DistributedSampler(SAMPLES, 1, 0)},
        {"sampler": ShardedSampler(SAMPLES, 1, 0)},
    ],
)
def test_loaders_that_walk_all_samples(options: dict[str, Any]) -> None:
    found = walk(**options)
    assert found.samples == 20
    assert found.data == walk().data
    assert found.data


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": Stream()},
        {"sampler": HalfSampler()},
        {"sampler": DistributedSampler(SAMPLES, 2, 0)},
        {"sampler": ShardedSampler(SAMPLES, 2, 0)},
        {"sampler": ShardedSampler(SAMPLES, span=(0.0, 0.5), even=False)},
        {"sampler": RandomSampler(SAMPLES, replacement=True)},
        {"sampler": RandomSampler(SAMPLES, num_samples=10)},
        {"sampler": data.WeightedRandomSampler([1.0] * 20, 20)},
        {"sampler": data.SubsetRandomSampler(range(10))},
    ],
)
def test_loaders_that_walk_a_part_or_nobody_knows_what(options: dict[str, Any]) -> None:
    assert walk(**options) == Walk()


def test_batches_of_a_users_class_may_be_divided() -> None:
    sampler = PairSampler(data.SequentialSampler(SAMPLES), 2, False)
    assert walk_of(iter(DataLoader(SAMPLES, batch_sampler=sampler))) == Walk()
    assert walk_of(iter(DataLoader(Stream(), batch_size=None))) == Walk()
    assert walk_of(iter(DataLoader(SAMPLES, batch_size=None))).samples == 20


def test_batches_of_tensors_in_memory() -> None:
    whole = [walk_of(iter(batches(SAMPLES, batch_size=4))) for _ in range(2)]
    assert whole[0] == whole[1]
    assert whole[0].samples == 20
    assert walk_of(iter(batches(SAMPLES, ShardedSampler(SAMPLES, 2, 0), 4))) == Walk()
    assert walk_of(iter(batches(SAMPLES, RandomSampler(SAMPLES), 4))).order == 0


def test_walks_tell_batches_that_the_loop_has_skipped_and_their_order() -> None:
    assert walk(taken=1) == walk(taken=1)
    assert walk(taken=1).data != walk(taken=2).data
    torch.manual_seed(3)
    one = walk(shuffle=True)
    torch.manual_seed(3)
    assert walk(shuffle=True).order == one.order != walk(shuffle=True).order
    seeded = [walk(shuffle=True, generator=torch.Generator().manual_seed(seed)).order for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


class Files(Dataset[int]):
    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder, self.more, self.transform = folder, more, torch.nn.ReLU()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        raise AssertionError("no sample is made to tell data sets apart")


FOLDER = Path("/data/imagenet/train")


@pytest.mark.parametrize(
    "make",
    [
        lambda number: TensorDataset(torch.arange(9.0) + number),
        lambda number: TensorDataset((torch.arange(9.0) + number).to(torch.complex64)),
        lambda number: TensorDataset(torch.arange(40.0).reshape(20, 2).t()[number]),
        lambda number: Subset(SAMPLES, range(number, 20, 2)),  # type: ignore[arg-type]
        lambda number: Files(FOLDER / str(number)),
        lambda number: Files(FOLDER, rank=number),
        lambda number: Files(FOLDER, files=[f"{one}.png" for one in range(number, 200, 2)]),
        lambda number: Files(FOLDER, values=np.arange(40)[number::2]),
        lambda number: [number] * 20,
        lambda number: [{"text": f"text {one + number}"} for one in range(20)],
    ],
)
def test_data_sets_of_unlike_content_are_told_apart(make: Callable[[int], Any]) -> None:
    assert digest_of(make(0)) == digest_of(make(0)) != digest_of(make(1))
    assert digest_of(make(0))


@pytest.mark.parametrize("make", [lambda: Files(Path("data"), size=3), lambda: torch.empty(9, device="meta"), object])
def test_options_alone_are_no_content(make: Callable[[], Any]) -> None:
    assert digest_of(make()) == b""


def test_content_is_looked_at_in_part_and_files_stay_as_they_are(tmp_path: Path) -> None:
    nested: Any = 1
    for _ in range(5):
        nested = [nested] * 100
    assert digest_of(nested)
    values = np.memmap(tmp_path / "values", np.float32, "w+", shape=(10_000,))
    values.flush()
    read = np.memmap(tmp_path / "values", np.float32, "r")
    assert digest_of(read)
    assert digest_of(np.array([{}] * 20, object)) == b""
    assert os.path.getsize(tmp_path / "values") == 40_000


def test_inputs_with_equal_elements_at_the_borders_are_told_apart() -> None:
    one, other = torch.zeros(64, 28, 28), torch.zeros(64, 28, 28)
    other[:, 13:15, 13:15] = 0.5
    assert checksum_of([one], 0) == checksum_of([one.clone()], 0) != checksum_of([other], 0)
    tokens = torch.zeros(8, 512, dtype=torch.int64)
    tokens[:, 0] = 101
    more = tokens.clone()
    more[:, 1:9] = torch.arange(8)
    assert checksum_of([tokens], 0) != checksum_of([more], 0)
    assert checksum_of([one], 0) != checksum_of([one], 1)
    assert checksum_of([one], 0) != checksum_of([one.reshape(28, 64, 28)], 0)
    assert checksum_of([torch.ones(3, dtype=torch.bool)], 0) != checksum_of([torch.zeros(3, dtype=torch.bool)], 0)
    assert checksum_of([torch.empty(0)], 0) == checksum_of([torch.empty(0)], 0)
    transposed = torch.arange(6.0).reshape(2, 3).t()
    assert checksum_of([transposed], 0) == checksum_of([transposed.contiguous()], 0)


@pytest.mark.parametrize("make", [lambda: torch.eye(3).to_sparse(), lambda: torch.empty(2, device="meta")])
def test_inputs_that_cannot_be_read_are_an_error(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        checksum_of([make()], 0)
