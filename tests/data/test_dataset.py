from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from paceline.data import ArrayDataset, batches

SAMPLES = ArrayDataset(torch.arange(12.0).view(6, 2), torch.arange(6))


@pytest.mark.parametrize("index", [torch.tensor([4, 1]), [4, 1], slice(1, 5, 3)], ids=["tensor", "list", "slice"])
def test_many_samples_are_fetched_at_once(index: object) -> None:
    images, labels = SAMPLES[index]  # type: ignore[index]
    assert sorted(labels.tolist()) == [1, 4]
    assert torch.equal(images[:, 0], 2.0 * labels)


def test_one_sample_has_no_batch_dimension() -> None:
    image, label = SAMPLES[3]
    assert image.tolist() == [6.0, 7.0]
    assert label.item() == 3


def test_torch_loader_makes_the_same_batches_by_samples_and_by_batches() -> None:
    by_samples = list(DataLoader(SAMPLES, batch_size=4))
    sampler = BatchSampler(SequentialSampler(SAMPLES), 4, drop_last=False)
    by_batches = list(DataLoader(SAMPLES, batch_size=None, sampler=sampler))
    assert [one[1].tolist() for one in by_samples] == [one[1].tolist() for one in by_batches] == [[0, 1, 2, 3], [4, 5]]
    assert by_samples[0][0].shape == by_batches[0][0].shape == (4, 2)


def test_shards_are_contiguous_views() -> None:
    shards = [SAMPLES.shard(4, part) for part in range(4)]
    assert [shard.tensors[1].tolist() for shard in shards] == [[0, 1], [2, 3], [4], [5]]
    assert shards[1].tensors[0].data_ptr() == SAMPLES.tensors[0][2:].data_ptr()


@pytest.mark.parametrize(
    ("length", "sizes"), [(10, [3, 3, 2, 2]), (9, [3, 2, 2, 2]), (8, [2, 2, 2, 2]), (3, [1, 1, 1, 0])]
)
def test_first_shards_get_what_is_left_over(length: int, sizes: list[int]) -> None:
    samples = ArrayDataset(torch.arange(length))
    shards = [samples.shard(4, part).tensors[0] for part in range(4)]
    assert [len(shard) for shard in shards] == sizes
    assert torch.cat(shards).tolist() == list(range(length))


@pytest.mark.parametrize("tensors", [(), (torch.zeros(3), torch.zeros(4)), (torch.tensor(1.0),)])
def test_tensors_without_common_length_are_refused(tensors: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(ValueError, match="one sample per row"):
        ArrayDataset(*tensors)


class _OneDevice(TorchDispatchMode):
    """Refuses to gather by indices on another device, as accelerators do; ``meta`` does not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_select.default:
            assert args[0].device == args[2].device
        return func(*args, **(kwargs or {}))


def test_tensors_of_an_accelerator_make_batches_there() -> None:
    data = ArrayDataset(torch.zeros(6, 2, device="meta"), torch.zeros(6))
    with _OneDevice():
        found = [(x.device.type, x.shape[0], y.device.type) for x, y in batches(data, batch_size=4)]
    assert found == [("meta", 4, "cpu"), ("meta", 2, "cpu")]
