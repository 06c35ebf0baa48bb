"""A process that is no worker of a job with servers cannot have a session."""

from __future__ import annotations

import pytest

from paceline import config
from paceline.errors import ConfigError
from paceline.worker.current import _Current


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        ("", "start the script with `paceline launch .* alone, create the store `local`"),
        ("1", "worker 1 knows none: .* without `-s 0`"),
    ],
)
def test_session_without_a_scheduler_says_what_to_start(rank: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.variable("rank"), rank)
    with pytest.raises(ConfigError, match=why):
        _Current().get()
