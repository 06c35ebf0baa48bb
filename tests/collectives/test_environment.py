"""Odd values of Horovod's variables."""

from __future__ import annotations

import pytest

from paceline.collectives.environment import find_place, read_settings
from paceline.errors import ConfigError

NUMBERS = (
    "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_CACHE_CAPACITY", "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "HOROVOD_START_TIMEOUT", "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
)  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "1e400", "soon", "9" * 400])
def test_number_that_cannot_be_is_refused_by_its_variable(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"^{name}='{text[:50]}.* is not a number"):
        read_settings()


@pytest.mark.parametrize(("rank", "size"), [("-1", "2"), ("2", "2"), ("0", "0"), ("0", "-3"), ("x", "2"), ("0", "1e3")])
def test_place_that_cannot_be_is_refused(rank: str, size: str) -> None:
    with pytest.raises(ConfigError, match="HOROVOD_RANK"):
        find_place({"HOROVOD_RANK": rank, "HOROVOD_SIZE": size})


@pytest.mark.parametrize(("disabled", "expected"), [("0", (60.0, 90.0)), ("1", (0.0, 0.0)), ("", (60.0, 90.0))])
def test_stalls_are_not_looked_for_where_that_is_disabled(
    disabled: str, expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", disabled)
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90")
    options = read_settings().options
    assert (options.stall_warning_s, options.stall_shutdown_s) == expected
