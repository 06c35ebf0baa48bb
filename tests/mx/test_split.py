import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.mx.context import cpu
from paceline.mx.gluon.utils import split_and_load, split_data, work_load_sizes


@pytest.mark.parametrize(
    ("batch", "weights", "sizes"),
    [(5, [1, 1], [2, 3]), (3, [1, 1], [2, 1]), (10, [3, 1], [8, 2]), (7, [1, 1, 1], [2, 2, 3]), (4, [1], [4])],
)
def test_work_load_list_slices_as_mxnet_does(batch, weights, sizes):
    assert work_load_sizes(batch, weights) == sizes


def test_empty_slice_is_refused_with_batch_and_weights():
    with pytest.raises(ValueError, match=r"batch of 2 over weights \[1, 1, 1\]"):
        work_load_sizes(2, [1, 1, 1])


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -2], [1, float("nan")], [float("inf"), 1]])
def test_weights_that_mean_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="above 0"):
        work_load_sizes(8, weights)


@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_sizes_cover_a_large_enough_batch_and_follow_the_weights(extra, weights):
    smallest = min(weights) / sum(weights)
    batch = int((len(weights) + 1) / smallest) + 1 + extra
    sizes = work_load_sizes(batch, weights)
    assert sum(sizes) == batch
    assert min(sizes) >= 1
    for size, weight in zip(sizes, weights, strict=True):
        assert abs(size - batch * weight / sum(weights)) <= len(weights)


@given(st.integers(1, 60), st.integers(1, 8), st.booleans())
def test_split_data_keeps_every_sample_in_order(size, num_slice, even_split):
    data = torch.arange(size)
    if even_split and size % num_slice:
        with pytest.raises(ValueError, match=str(size)):
            split_data(data, num_slice, even_split=even_split)
        return
    slices = split_data(data, num_slice, even_split=even_split)
    assert torch.equal(torch.cat(slices), data)
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_split_data_follows_the_batch_axis():
    slices = split_data(torch.zeros(3, 4, 5), 2, batch_axis=1)
    assert [tuple(one.shape) for one in slices] == [(3, 2, 5), (3, 2, 5)]


def test_indivisible_batch_says_what_to_do():
    with pytest.raises(ValueError, match="even_split=False"):
        split_data(torch.zeros(5), 2)


def test_fewer_samples_than_devices_leave_the_last_slices_empty_where_uneven_is_allowed():
    with pytest.raises(ValueError, match=r"2 samples cannot feed 3 devices.*even_split=False"):
        split_data(torch.zeros(2), 3)
    slices = split_data(torch.arange(4).view(2, 2), 4, batch_axis=1, even_split=False)
    assert [one.tolist() for one in slices] == [[[0], [2]], [[1], [3]], [[], []], [[], []]]
    assert [len(one) for one in split_and_load(torch.zeros(2), [cpu(0), cpu(1), cpu(2)], even_split=False)] == [1, 1, 0]


def test_missing_axis_is_refused():
    with pytest.raises(ValueError, match="no batch axis 1"):
        split_data(torch.zeros(4), 2, batch_axis=1)


def test_split_and_load_takes_arrays_and_device_names():
    slices = split_and_load(np.arange(8, dtype=np.float32), ctx_list=["cpu", "cpu(1)"], batch_axis=0)
    assert [one.tolist() for one in slices] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_split_and_load_weighs_devices():
    assert [len(one) for one in split_and_load(torch.zeros(10), [cpu(0), cpu(1)], work_load_list=[3, 1])] == [8, 2]


def test_one_device_takes_any_batch_whole():
    data = torch.zeros(7)
    assert split_and_load(data, cpu())[0].data_ptr() == data.data_ptr()


def test_number_of_weights_must_be_number_of_devices():
    with pytest.raises(ValueError, match="3 weights for 2 devices"):
        split_and_load(torch.zeros(8), [cpu(0), cpu(1)], work_load_list=[1, 1, 1])
