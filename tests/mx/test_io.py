"""Iterators: parts, orders, last batches, and MNIST's files."""

from __future__ import annotations

import gzip
import struct

import pytest
import torch

from paceline import mx
from paceline.errors import PacelineError
from paceline.mx.io import as_pair


def ids(batches):
    return [one.data[0].tolist() for one in batches]


def test_parts_are_equal_and_apart():
    parts = [mx.io.NDArrayIter(torch.arange(11), batch_size=2, num_parts=2, part_index=index) for index in (0, 1)]
    assert [ids(one) for one in parts] == [[[0, 1], [2, 3], [4, 0]], [[5, 6], [7, 8], [9, 5]]]
    assert [one.pad for one in parts[0]] == [0, 0, 1]


def test_arrays_may_have_names_as_in_mxnet():
    (batch,) = mx.io.NDArrayIter({"b": torch.ones(2), "a": torch.zeros(2)}, {"label": [4, 5]}, batch_size=2)
    assert [one.tolist() for one in (*batch.data, *batch.label)] == [[0, 0], [1, 1], [4, 5]]


def test_every_epoch_has_its_own_order_of_all_samples():
    shuffled, again = (mx.io.NDArrayIter(torch.arange(8), batch_size=4, shuffle=True, seed=3) for _ in range(2))
    first, second = ids(shuffled), ids(shuffled)
    assert all(sorted(one for batch in epoch for one in batch) == list(range(8)) for epoch in (first, second))
    assert first != second
    assert ids(again) == first


def test_last_batch_is_left_out_on_request():
    batches = mx.io.NDArrayIter([[1], [2], [3]], [4, 5, 6], 2, last_batch_handle="discard")
    assert len(batches) == 1
    [batch] = batches
    assert (batch.data[0].tolist(), batch.label[0].tolist()) == ([[1], [2]], [4, 5])


def test_a_module_does_not_see_samples_that_fill_a_batch_up():
    data, label = torch.eye(3), torch.arange(3)
    module = mx.mod.Module(torch.nn.Identity())
    batches = mx.io.NDArrayIter(data, label, 2)
    assert torch.equal(module.predict(batches), data)
    assert [len(as_pair(one)[1]) for one in batches] == [2, 1]


def test_a_loop_of_the_user_takes_batches():
    module = mx.mod.Module(torch.nn.Linear(2, 2), context=[mx.cpu(0), mx.cpu(1)])
    module.init_optimizer(optimizer_params={"learning_rate": 0.5})
    with pytest.raises(ValueError, match="call forward_backward"):
        module.update()
    metric, data = mx.metric.create("acc"), torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    for _ in range(15):
        metric.reset()
        for batch in mx.io.NDArrayIter(data, (data[:, 0] > 0).long(), 8):
            module.forward_backward(batch)
            module.update_metric(metric, batch.label)
            module.update()
    assert metric.get_name_value()[0][0] == "accuracy"
    assert metric.get()[1] > 0.8


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_of_mnist(tmp_path, suffix):
    write = gzip.compress if suffix else bytes
    pixels = bytes(range(24))
    image, label = tmp_path / f"images{suffix}", tmp_path / f"labels{suffix}"
    image.write_bytes(write(struct.pack(">4B3I", 0, 0, 8, 3, 4, 2, 3) + pixels))
    label.write_bytes(write(struct.pack(">4BI", 0, 0, 8, 1, 4) + bytes([7, 8, 9, 1])))
    batches = mx.io.MNISTIter(image, label, 2, shuffle=False, flat=True, num_parts=2, part_index=1)
    [batch] = batches
    assert batch.label[0].tolist() == [9, 1]
    assert batch.data[0].mul(256).tolist() == [[12, 13, 14, 15, 16, 17], [18, 19, 20, 21, 22, 23]]
    [whole] = mx.io.MNISTIter(image, label, 4, shuffle=False)
    assert whole.data[0].shape == (4, 1, 2, 3)
    damaged = tmp_path / f"damaged{suffix}"
    damaged.write_bytes(label.read_bytes()[:12] + b"\xff" * 20)
    label.write_bytes(write(struct.pack(">4BI", 0, 0, 8, 1, 5) + bytes(4)))
    for path in (label, damaged, tmp_path / "none"):
        with pytest.raises(PacelineError, match="IDX file"):
            mx.io.MNISTIter(image, path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"last_batch_handle": "roll_over"}, "'pad' or 'discard'"),
        ({"num_parts": 2, "part_index": 2}, "0 to 1"),
        ({"label": [1]}, "as long"),
        ({"batch_size": 5}, "a part has 4 samples"),
    ],
)
def test_impossible_iterators_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        mx.io.NDArrayIter(torch.arange(4), **options)
