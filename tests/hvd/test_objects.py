"""What pickling an object needs."""

from __future__ import annotations

import pickle

import pytest

from paceline.errors import MissingExtraError
from paceline.hvd import objects


def test_lambda_without_cloudpickle_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_pickler", pickle)
    with pytest.raises(MissingExtraError, match=r"pip install 'paceline\[hvd\]'"):
        objects.dumps(lambda: 1)
    assert pickle.loads(objects.dumps([1])) == [1]
