from __future__ import annotations

import pytest

from paceline.launch import BACKENDS, backend


def test_every_registered_backend_can_be_made() -> None:
    for name in BACKENDS:
        assert callable(backend(name).submit)


@pytest.mark.parametrize(("name", "hint"), [("locl", "did you mean 'local'"), ("xyz", "known are .*local")])
def test_unknown_launcher_gets_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"unknown launcher '{name}'; {hint}"):
        backend(name)
