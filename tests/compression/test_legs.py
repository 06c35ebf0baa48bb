"""Settings of compression name the legs that a codec works on."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.compression import by_leg


@pytest.mark.parametrize(
    ("params", "legs"),
    [
        (None, {}),
        ("none", {}),
        ((), {}),
        ({"type": "none", "leg": "both"}, {}),
        ("fp16", {"push": "fp16"}),
        ({"type": "2bit"}, {"push": "2bit"}),
        ({"type": "int8", "leg": "pull"}, {"pull": "int8"}),
        ({"type": "int8", "leg": "both"}, {"push": "int8", "pull": "int8"}),
        (["2bit", {"type": "int8", "leg": "pull"}], {"push": "2bit", "pull": "int8"}),
        ([{"type": "int8", "leg": "both"}, "int8"], {"push": "int8", "pull": "int8"}),
    ],
)
def test_legs_have_the_codecs_that_settings_name(params: Any, legs: dict[str, str]) -> None:
    assert {leg: codec.name for leg, codec in by_leg(params).items()} == legs


def test_parameters_of_the_codec_are_kept() -> None:
    assert by_leg({"type": "2bit", "threshold": 0.25, "leg": "pull"})["pull"].params() == {
        "type": "2bit",
        "threshold": 0.25,
    }


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"type": "int8", "leg": "pushes"}, "leg is 'pushes'"),
        ({"type": "int8", "leg": None}, "leg is None"),
        ({"type": "int8", "leg": ["push"]}, "'push', 'pull' or 'both'"),
        ({"leg": "push"}, "have no 'type'"),
        ([{"type": "int8", "leg": "both"}, {"type": "2bit", "leg": "pull"}], "two codecs for the pull leg"),
        ([{"type": "2bit"}, {"type": "2bit", "threshold": 0.1}], "two codecs for the push leg"),
    ],
)
def test_wrong_settings_are_refused(params: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        by_leg(params)
