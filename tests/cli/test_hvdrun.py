"""``paceline hvdrun``: horovodrun's flags."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.hvdrun import run
from paceline.cli.options import UsageError

SCRIPT = """
import os, torch
import paceline.hvd as hvd
hvd.init()
print("sum", hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum).item(), os.environ["HOROVOD_FUSION_THRESHOLD"])
"""


def test_script_runs_on_all_ranks_with_the_flags(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "paceline",
        "hvdrun",
        "-np",
        "2",
        "-H",
        "localhost:2",
        "--fusion-threshold-mb",
        "2",
    ]
    command += ["--disable-cache", "--no-stall-check", sys.executable, "train.py"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"sum 3 {2 * 1024 * 1024}") == 2


def test_flags_become_variables(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cycle-time-ms", "2.5", "--cache-capacity", "1048577", "--no-hierarchical-allreduce"]
    assert run("hvdrun", ["-np", "1", "--dry-run", *flags, "--", sys.executable]) == 0
    printed = capsys.readouterr().out
    assert "HOROVOD_CYCLE_TIME=2.5" in printed
    assert "HOROVOD_CACHE_CAPACITY=1048577" in printed
    assert "HOROVOD_HIERARCHICAL_ALLREDUCE=0" in printed


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "-np"),
        (["-np", "3", "-H", "localhost:2"], "only 2 slots"),
        (["-H", "far.example:2"], "another host"),
        (["-H", "localhost:many"], "-H takes host:slots.*'localhost:many' is not a host"),
        (["-H", "localhost:²"], "-H takes host:slots"),
        (["-np", "2", "-H", ""], "-H takes host:slots, as in localhost:2: .* names no host"),
        (["-np", "0"], "number of workers is 0"),
        (["-np", "2", "--cycle-time-ms", "-1"], "--cycle-time-ms: -1 is too small; it is at least 0"),
        (["-np", "2", "--lr", "1"], "options of your script come after it"),
    ],
)
def test_wrong_command_lines(words: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        run("hvdrun", [*words, "--", sys.executable])
