import numpy as np
import torch
from sklearn.datasets import load_digits

from paceline.data import digits
from paceline.data.digits import read_digits
from tests.clusters import programs


def test_split_is_stratified_and_has_the_shape_of_mnist() -> None:
    (train, train_labels), (test, test_labels) = digits().tensors, digits(train=False).tensors
    assert (train.shape, train.dtype, train_labels.dtype) == ((1437, 1, 28, 28), torch.float32, torch.int64)
    assert test.shape == (360, 1, 28, 28)
    counts, all_counts = test_labels.bincount(), train_labels.bincount() + test_labels.bincount()
    assert (counts - all_counts / 5).abs().max() < 1
    assert train.min() == 0
    assert 0.99 < train.max() <= 1


def test_no_test_image_is_a_training_image() -> None:
    train, test = (digits(train=which).tensors[0].flatten(1) for which in (True, False))
    assert torch.cdist(test, train).min() > 0.1


def test_parts_join_to_the_whole() -> None:
    parts = [digits(True, 4, part).tensors[1] for part in range(4)]
    assert torch.equal(torch.cat(parts), digits().tensors[1])


def test_it_is_the_data_set_of_scikit_learn() -> None:
    images, labels = load_digits(return_X_y=True)
    pixels, classes = read_digits()
    assert np.array_equal(pixels.reshape(-1, 64), images)
    assert np.array_equal(classes, labels)


def test_it_needs_no_scikit_learn() -> None:
    code = "import sys, paceline.data; paceline.data.digits(); sys.exit('sklearn' in sys.modules)"
    assert programs.run(["-c", code]).returncode == 0
