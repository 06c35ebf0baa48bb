from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.config import Settings
from paceline.kvstore.dist.store_policy import resolve_policy
from paceline.worker.session import Session


def session(**settings: Any) -> Session:
    return cast(Session, SimpleNamespace(settings=Settings(num_workers=2, **settings), workers=[]))


@pytest.mark.parametrize(
    ("store_type", "setting"),
    [
        ("dist_sync", {"weighting": "inverse"}),
        ("dist_sync", {"age": 3}),
        ("dist_sync", {"staleness": 3}),
        ("dist_async", {"groups": "groups.txt"}),
        ("dist_ssync", {"groups": "groups.txt"}),
    ],
)
def test_setting_that_a_type_does_not_have_is_warned_of(store_type: str, setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.warns(UserWarning, match=rf"PACELINE_{name.upper()} \(--{name}\) is set, but a {store_type} store has"):
        resolve_policy(store_type, session(**setting), {})


def test_setting_that_a_type_has_is_used_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_policy("dist_ssync", session(staleness=2, weighting="inverse", age=3), {}).bound == 2
