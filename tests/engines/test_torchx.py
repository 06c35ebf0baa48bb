"""The component of TorchX, run by TorchX's own program and its scheduler local_cwd."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.engines import jobs

VENV = Path(os.environ.get("PACELINE_TEST_ENGINES_VENV", "/nowhere"))
TORCHX = VENV / "bin" / "torchx"
COMPONENT = jobs.ROOT / "src" / "paceline" / "launch" / "engines" / "torchx_app" / "component.py"

pytestmark = [
    pytest.mark.skipif(not TORCHX.exists(), reason="needs TorchX (PACELINE_TEST_ENGINES_VENV)"),
    pytest.mark.timeout(400),
]


def torchx(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{jobs.ROOT / 'src'}:{jobs.ROOT}", "HOME": str(home)}
    return subprocess.run(
        [str(TORCHX), *words], capture_output=True, text=True, check=False, timeout=300, cwd=jobs.ROOT, env=env
    )


def run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    given = ["--scheduler", "local_cwd", "--workspace", "", "--wait", f"{COMPONENT}:job", "--python", jobs.PYTHON]
    return torchx("run", *given, *words, home=home)


def test_mnist_trains(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [jobs.PYTHON, "examples/train_mnist.py", "--kv-store", "dist_sync", "--result", str(result)]
    done = run(
        tmp_path, "--workers", "2", "--servers", "2", "--env", "OMP_NUM_THREADS=1", "--port", "9377", "--", *command
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(result.read_text())["accuracy"][-1] >= 0.95
    assert (tmp_path / ".paceline" / "torchx.key").stat().st_mode & 0o777 == 0o600


def test_failure_fails_the_application(tmp_path: Path) -> None:
    done = run(tmp_path, "--workers", "2", "--servers", "1", "--port", "9378", "--", jobs.PYTHON, "-c", jobs.FAILS)
    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr


def test_dry_run_shows_a_role_each_and_no_key(tmp_path: Path) -> None:
    words = ["--group", "a:n=2,cpus=2;old:n=1,args=$HOME", "--servers", "1", "--", "python", "train.py"]
    given = ["run", "--dryrun", "--scheduler", "local_cwd", "--workspace", "", f"{COMPONENT}:job"]
    done = torchx(*given, *words, home=tmp_path)
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    for role in ("scheduler", "server", "worker-a", "worker-old"):
        assert re.search(rf"\b{role}\b", shown), shown
    assert (tmp_path / ".paceline" / "torchx.key").read_bytes() not in shown.encode()


def test_torchx_finds_the_component_and_its_own_by_name(tmp_path: Path) -> None:
    shown = torchx("builtins", home=tmp_path).stdout
    if (
        "paceline"
        not in subprocess.run([str(VENV / "bin" / "pip"), "list"], capture_output=True, text=True, check=True).stdout
    ):
        pytest.skip("paceline is not installed there: make test-engines does it")
    assert re.search(r"\bpaceline\.job\b", shown), shown
    assert re.search(r" dist\.ddp\b", shown), shown
