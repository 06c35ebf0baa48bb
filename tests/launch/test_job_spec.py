from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.launch import Graces, JobSpec


def test_servers_default_to_the_number_of_workers() -> None:
    assert JobSpec(("train",), 3).servers == 3
    assert JobSpec(("train",), 3, 1).servers == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": ()}, "there is no command"),
        ({"command": ("",)}, "there is no command"),
        ({"num_workers": 0}, "number of workers is 0"),
        ({"num_servers": -1}, "number of servers is -1"),
        ({"hosts": ()}, "no host"),
        ({"env": {"A=B": "1"}}, "'A=B' is not the name"),
        ({"env": {"": "1"}}, "'' is not the name"),
    ],
)
def test_impossible_job_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobSpec(**({"command": ("train",), "num_workers": 2} | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stalenes": "1"}, "'stalenes' is not a setting"),
        ({"staleness": "many"}, "staleness='many' is not an integer"),
        ({"staleness": "-1"}, "staleness is -1"),
        ({"timeout_s": "0"}, "timeout_s is 0"),
    ],
)
def test_setting_that_no_process_could_use_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobSpec(("train",), 2, settings=settings)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_grace_without_end_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="survivors_s"):
        Graces(survivors_s=value)
