import subprocess
import sys

import pytest
import torch

from paceline.data import digits
from paceline.errors import DataError


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


def test_missing_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'paceline\[examples\]'"):
        digits()


def test_importing_the_package_does_not_import_scikit_learn() -> None:
    code = "import sys, paceline.data; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
