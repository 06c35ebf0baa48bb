"""No optimizer of another test says when batches are used."""

import pytest

from paceline.data import dealt


@pytest.fixture(autouse=True)
def _no_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealt, "_uses", dealt._Uses())
