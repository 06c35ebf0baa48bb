"""Files of speeds, groups and data sharding."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.consistency import parse_groups
from paceline.data import read_spans
from paceline.hetero.files import groups_text, parse_speeds, sharding_text


def test_speeds_are_read_in_order() -> None:
    assert parse_speeds("# measured\nb:0 0.5 # slow\n\na 1e-1\n") == {"b:0": 0.5, "a": 0.1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no lines"),
        ("a", "line 1: 'a' is not"),
        ("a 1\nb fast", "line 2"),
        ("a 0", "line 1"),
        ("a nan", "line 1"),
        ("a 1\na 2", "'a' occurs twice"),
    ],
)
def test_wrong_line_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_speeds(text)


def test_groups_are_written_as_they_are_read() -> None:
    text = groups_text(((1, 2), (0,)), {"slow": 4.0, "fast:0": 1.0, "fast:1": 2.0})
    assert text == "fast:0 fast:1  # 1.5 s per step\nslow  # 4 s per step\n"
    assert parse_groups(text) == [["fast:0", "fast:1"], ["slow"]]


def test_sharding_is_in_proportion_to_speed_and_covers_everything(tmp_path: Path) -> None:
    path = tmp_path / "data_sharding"
    path.write_text(sharding_text([1.0, 2.0, 4.0]))
    spans = read_spans(path, 3)
    assert (spans[0][0], spans[-1][1]) == (0, 1)
    assert [end - begin for begin, end in spans] == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=1e-5)
    assert [spans[0][1], spans[1][1]] == [spans[1][0], spans[2][0]]
    path.write_text(sharding_text([0.123456789] * 40))
    assert len(read_spans(path, 40)) == 40
