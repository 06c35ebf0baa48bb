"""``paceline group``."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.data import read_spans


@pytest.fixture
def speeds(tmp_path: Path) -> str:
    path = tmp_path / "speeds"
    path.write_text("a:0 0.21\na:1 0.2\nb 0.8\nc 0.1\nd 0.105\ne 0.79\n")
    return str(path)


def test_speeds_become_groups_shares_and_a_picture(
    speeds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("groups", "data_sharding", "clusters.png")]
    assert main(["group", speeds, "--groups", files[0], "--data-sharding", files[1], "--plot", files[2]]) == 0
    shown = capsys.readouterr().out
    assert [line.split("#")[0].split() for line in shown.splitlines()] == [["c", "d"], ["a:0", "a:1"], ["b", "e"]]
    assert Path(files[0]).read_text() == shown
    widths = [end - begin for begin, end in read_spans(files[1], 6)]
    assert widths[3] == pytest.approx(8 * widths[2], rel=1e-3)
    assert Path(files[2]).read_bytes().startswith(b"\x89PNG")


def test_limits_of_the_clusters_are_options(speeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["group", speeds, "--max-groups", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["group", speeds, "--alike", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        ([], 2, "give one speeds file, not 0"),
        (["--groups", "x"], 2, "give one speeds file, not 0"),
        (["nowhere"], 2, "the speeds file 'nowhere' cannot be read: No such file"),
        (["{}", "--alike", "1"], 2, "a ratio above 1"),
        (["{}", "--groups", "/nowhere/groups"], 2, "cannot be written"),
        (["{}", "--alike", "nan"], 2, "--alike: 'nan' is not a number"),
        (["{}", "--max-groups", "0"], 2, "--max-groups: 0 is too small"),
        (["{}", "--plot", "/nowhere/x.png"], 2, "/nowhere/x.png cannot be written: No such file"),
        (["{}", "--plot", "clusters.nonsense"], 2, "nonsense"),
        (["{}", "--plot", "clusters"], 2, "its format follows from its name"),
        (["{}", "--groups", "{}"], 2, "is named twice"),
        (["{}", "--groups", "{0}.new", "--data-sharding", "{0}.new"], 2, "is named twice"),
    ],
)
def test_what_is_wrong_is_said(
    speeds: str, words: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path(speeds).read_text()
    assert main(["group", *(word.format(speeds) for word in words)]) == code
    assert why in capsys.readouterr().err
    assert [one.read_text() for one in Path(speeds).parent.iterdir()] == [before]


def test_full_disk_leaves_the_groups_file_as_it_was(
    speeds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "groups").write_text("0;\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert main(["group", speeds, "--groups", str(tmp_path / "groups")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "groups cannot be written" in capsys.readouterr().err
    assert (tmp_path / "groups").read_text() == "0;\n"
    assert not list(tmp_path.glob("*.new"))


def test_names_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, groups = tmp_path / "speeds", tmp_path / "groups"
    path.write_text("\x1b[31mred 0.1\nb 0.1\n")
    assert main(["group", str(path), "--groups", str(groups)]) == 0
    assert capsys.readouterr().out.startswith("\\x1b[31mred b")
    assert groups.read_text().startswith("\x1b[31mred b")
