"""What pickling an object needs."""

from __future__ import annotations

import pickle

import pytest

from paceline.errors import MissingExtraError
from paceline.hvd import functions


def test_lambda_without_cloudpickle_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_pickler", pickle)
    with pytest.raises(MissingExtraError, match=r"pip install 'paceline\[hvd\]'"):
        functions.dumps(lambda: 1)
    assert pickle.loads(functions.dumps([1])) == [1]
