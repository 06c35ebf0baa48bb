"""``paceline simulate``."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import main

CLUSTER = """
[[workers]]
count = 2
batch_s = 1.0
[[workers]]
count = 2
batch_s = 3.0
[model]
bytes = 100
"""


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return str(path)


def test_types_of_stores_are_compared_and_drawn(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    stores = ["--kv-store", "dist_sync", "--kv-store", "dist_gsync:pool"]
    assert main(["simulate", cluster, *stores, "--seconds", "600", "--target", "0.5", "--plot", str(picture)]) == 0
    head, sync, groups = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "target", "accuracy", "samples/s", "computing", "updates", "staleness", "step", "mass", "data", "bytes",
    ]  # fmt: skip
    assert sync.split()[0] == "dist_sync"
    assert groups.split()[0] == "dist_gsync:pool"
    assert float(groups.split()[1]) < float(sync.split()[1])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_cost_model_prints_what_can_be_worked_out(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", cluster, "--learn", "nothing", "--rounds", "3"]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    rate, computing = f"{3 * 4 * 32 / 9:.1f}", "66.7%"
    assert cells == ["dist_sync", "-", "-", rate, computing, "3", "1.00", "0.3", "25.0%", "25.0%", "2.4e+03"]


def test_local_steps_have_the_period_that_they_have_in_scripts(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", cluster, "--learn", "nothing", "--rounds", "3", "--local-steps", "6 by speed"]
    assert main([*words, "--compression", "int4", "--delay", "1"]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    seconds, samples = 18 + 6 + 6, 32 * (4 * 6 + 2 * (2 * 6 + 2 * 2))
    assert cells[3:6] == [f"{samples / seconds:.1f}", "80.0%", "3"]
    assert cells[-1] == f"{17 / 128 * 2.4e3:.3g}"
    assert main(["simulate", cluster, "--learn", "nothing", "--rounds", "1", "--local-steps", "1 s"]) == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "give one cluster file, not 0"),
        (["--rounds", "3"], "give one cluster file, not 0"),
        (["{}", "{}"], "give one cluster file, not 2"),
        (["no-such-file"], "cluster file no-such-file cannot be read: No such file or directory"),
        (["{}", "--rounds", "0"], "--rounds: 0 is too small; it is at least 1"),
        (["{}", "--seconds", "nan"], "--seconds: 'nan' is not a number above 0"),
        (["{}", "--batch-size", "-3"], "--batch-size: -3 is too small"),
        (["{}", "--lr", "-1"], "--lr: '-1' is not a number above 0"),
        (["{}", "--target", "95"], "--target is 95; an accuracy is at most 1"),
        (["{}", "--seed", "-1"], "--seed: -1 is too small; it is at least 0"),
        (["{}", "--staleness", "3"], "--staleness changes nothing for dist_sync; it is for dist_ssync, dist_gsync"),
        (["{}", "--kv-store", "dist_async", "--weighting", "invers"], "did you mean 'inverse'?"),
        (["{}", "--kv-store", "dist_sync:meassured"], "did you mean 'measured'?"),
        (["{}", "--learn", "nothing", "--rounds", "1", "--plot", "/no/x.png"], "/no/x.png cannot be written: No such"),
        (["{}", "--kv-store", "dist_snyc"], "is not a distributed store type"),
        (["{}", "--kv-store", "dist_sync:fair"], "shares 'fair' are unknown"),
        (["{}", "--delay", "2"], "--delay changes nothing without --local-steps"),
        (["{}", "--local-steps", "many"], "local_steps='many': give a number of steps"),
        (["{}", "--learn", "chess"], "known are digits, nothing"),
        (["{}", "--rounds", "2", "--learn", "nothing", "--plot", "picture.nonsense"], "nonsense"),
        (["{}", "--rounds", "2", "--learn", "nothing", "--plot", ""], "its format follows from its name"),
        (
            ["{}", "--rounds", "2", "--learn", "nothing", "--target", "0.9"],
            "--target changes nothing with --learn nothing",
        ),
    ],
)
def test_wrong_command_line_says_what_is_right(
    cluster: str, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *(word.format(cluster) for word in words)]) == 2
    assert why in capsys.readouterr().err


def test_options_that_not_all_jobs_have_say_which_ones_do(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    stores = [word for kind in ("dist_sync", "dist_ssync", "dist_gsync:pool") for word in ("--kv-store", kind)]
    words = [*stores, "--learn", "nothing", "--rounds", "2", "--staleness", "3", "--age", "4"]
    assert main(["simulate", cluster, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["--staleness 3 counts for dist_ssync, dist_gsync", "--age 4 counts for dist_ssync"]


def test_groups_come_from_a_file(cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = tmp_path / "groups"
    groups.write_text("0 1 2\n3\n")
    words = ["--kv-store", "dist_gsync", "--learn", "nothing", "--rounds", "2"]
    assert main(["simulate", cluster, *words, "--groups", str(groups)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[5] == "4"


def test_dist_auto_says_what_it_chose_and_trains_so(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    stores = ["--kv-store", "dist_auto", "--kv-store", "dist_sync:measured"]
    assert main(["simulate", cluster, *stores, "--learn", "nothing", "--rounds", "200"]) == 0
    sentence, _, auto, measured = capsys.readouterr().out.splitlines()
    assert sentence.startswith("dist_auto: dist_sync with batches by speed: 2 of 4 workers take up to 3 times as long")
    assert auto.split()[1:] == measured.split()[1:]
