from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from paceline.launch.engines.torchx_app.start import START, environment, job_key
from paceline.net import Security

LATE = {"PACELINE_SCHEDULER": "SCHEDULER", "DMLC_PS_ROOT_URI": "SCHEDULER_HOST", "PACELINE_JOB_KEY": "JOB_KEY"}


def test_replica_learns_its_rank_and_the_scheduler(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"s" * 32)
    start = {"late": LATE, "first_rank": 2, "port": 9091, "key_file": str(tmp_path / "key")}
    env = environment(start, "app-1", 1, "node7")
    assert env["PACELINE_RANK"] == "3"
    assert (env["PACELINE_SCHEDULER"], env["DMLC_PS_ROOT_URI"]) == ("tcp://node7:9091", "node7")
    assert env["PACELINE_JOB_KEY"] == job_key(b"s" * 32, "app-1")


def test_every_application_has_a_key_of_its_own() -> None:
    first, second = job_key(b"s" * 32, "app-1"), job_key(b"s" * 32, "app-2")
    assert first != second
    assert Security(first).psk


def test_it_becomes_the_command_with_its_exit_code() -> None:
    start = json.dumps({"late": {}, "first_rank": 0, "port": 1, "key_file": ""})
    command = ["sh", "-c", 'echo "$PACELINE_RANK $1"; exit 5', "x", "a  b"]
    words = [sys.executable, "-m", START, start, "app", "4", "HOST", *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "4 a  b\n")


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    start = json.dumps({"late": LATE, "first_rank": 0, "port": 1, "key_file": str(tmp_path / "none")})
    words = [sys.executable, "-m", START, start, "app", "0", "HOST", "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (127, f"{tmp_path / 'none'}: No such file or directory\n")
