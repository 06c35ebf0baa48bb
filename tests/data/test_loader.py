from itertools import islice

import pytest
import torch
from torch.utils.data import Dataset, RandomSampler, TensorDataset

from paceline.data import ArrayDataset, ShardedSampler, batches

SAMPLES = ArrayDataset(torch.arange(20.0).view(10, 2), torch.arange(10))


def test_batches_hold_the_samples_that_the_sampler_names_in_its_order() -> None:
    sampler = ShardedSampler(SAMPLES, num_parts=2, part_index=1)
    loader = batches(SAMPLES, sampler, 2)
    epoch = list(loader)
    assert len(epoch) == len(loader) == 3
    labels = torch.cat([label for _, label in epoch])
    assert labels.tolist() == sampler.indices(0).tolist()
    for images, label in epoch:
        assert images.tolist() == [[2 * one, 2 * one + 1] for one in label.tolist()]


def test_drop_last_leaves_out_the_small_batch() -> None:
    loader = batches(SAMPLES, ShardedSampler(SAMPLES), 4, drop_last=True)
    assert [len(labels) for _, labels in loader] == [4, 4]
    assert len(loader) == 2


def test_without_sampler_all_samples_come_in_order() -> None:
    assert torch.cat([labels for _, labels in batches(SAMPLES, batch_size=3)]).tolist() == list(range(10))


def test_sampler_with_a_global_batch_decides_the_batch_size() -> None:
    slow, fast = (ShardedSampler(SAMPLES, span=span, global_batch_size=5) for span in [(0.0, 0.4), (0.4, 1.0)])
    assert [len(labels) for _, labels in batches(SAMPLES, slow)] == [2, 2]
    assert [len(labels) for _, labels in batches(SAMPLES, fast)] == [3, 3]
    with pytest.raises(ValueError, match="the sampler's 3"):
        batches(SAMPLES, fast, 4)


def test_any_torch_sampler_and_tensor_data_set_will_do() -> None:
    dataset = TensorDataset(torch.arange(6))
    loader = batches(dataset, RandomSampler(dataset), 4)
    assert sorted(torch.cat([one for (one,) in loader]).tolist()) == list(range(6))
    assert len(loader) == 2


def test_loader_resumes_in_mid_epoch_with_its_sampler() -> None:
    sampler, fresh = ShardedSampler(SAMPLES), ShardedSampler(SAMPLES)
    seen = [labels for _, labels in islice(batches(SAMPLES, sampler, 3), 2)]
    fresh.load_state_dict(sampler.state_dict())
    rest = [labels for _, labels in batches(SAMPLES, fresh, 3)]
    assert torch.cat(seen + rest).tolist() == fresh.indices(0).tolist()


@pytest.mark.parametrize("size", [None, 0])
def test_batch_size_is_needed(size: int | None) -> None:
    with pytest.raises(ValueError, match="it must be at least 1"):
        batches(SAMPLES, ShardedSampler(SAMPLES), size)


def test_data_set_outside_memory_is_refused() -> None:
    class Elsewhere(Dataset[int]):
        pass

    with pytest.raises(TypeError, match=r"Elsewhere does not lie in memory.*DataLoader"):
        batches(Elsewhere(), None, 4)  # type: ignore[arg-type]
