import logging
from pathlib import Path

import pytest

from paceline.data import read_spans
from paceline.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "data_sharding"
    path.write_text(text)
    return path


def test_line_of_a_rank_is_its_span(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "# slow, fast\n0 0.3\n\n0.3\t1\n")
    with caplog.at_level(logging.WARNING):
        assert read_spans(path, num_workers=2) == [(0.0, 0.3), (0.3, 1.0)]
    assert not caplog.records


@pytest.mark.parametrize("line", ["0.3", "0.3 0.5 0.7", "a b", "0.5 0.3", "0.3 1.5", "-0.1 0.2", "nan 1"])
def test_bad_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"data_sharding, line 2: .*'begin end'"):
        read_spans(write(tmp_path, f"0 0.3\n{line}\n"))


def test_file_without_a_line_for_each_worker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 2 lines 'begin end'; it needs 3, one per worker"):
        read_spans(write(tmp_path, "0 0.5\n0.5 1\n"), num_workers=3)


def test_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs at least one"):
        read_spans(write(tmp_path, "# nothing yet\n"))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere cannot be read"):
        read_spans(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("0 0.3\n0.4 1\n", "no worker trains on the samples from 0.3 to 0.4"),
        ("0.25 1\n", "no worker trains on the samples from 0 to 0.25"),
        ("0 0.75\n", "no worker trains on the samples from 0.75 to 1"),
        ("0.5 1\n0 0.6\n", "several workers train on the samples from 0.5 to 0.6"),
        ("0 1\n0.2 0.4\n", "several workers train on the samples from 0.2 to 0.4"),
    ],
)
def test_gaps_and_overlaps_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, warning: str
) -> None:
    with caplog.at_level(logging.WARNING):
        read_spans(write(tmp_path, text))
    assert [warning] == [record.getMessage().split(": ", 1)[1] for record in caplog.records]
