from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import paceline.compression

PACKAGE = Path(paceline.compression.__file__).parent


def run(code: str, path: Path, **environment: str) -> str:
    """Run code in a fresh interpreter that finds paceline in ``path``."""
    result = subprocess.run(
        [sys.executable, "-B", "-c", code],
        # torch would look for the backend of an installed paceline in the parts that ``path`` has.
        env=os.environ | {"PYTHONPATH": str(path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_numba_is_imported_when_a_kernel_is_needed_and_not_before() -> None:
    code = """
import sys, torch
from paceline.compression import make
codec = make("2bit")
state = codec.new_state(3)
assert "numba" not in sys.modules
codec.encode(torch.ones(3), state)
assert "numba" in sys.modules
"""
    run(code, PACKAGE.parent.parent)


def test_kernels_work_where_nothing_can_be_cached(tmp_path: Path) -> None:
    package = tmp_path / "paceline"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, package / "compression", ignore=ignored)
    for module in ("errors.py", "extensions.py", "naming.py"):
        shutil.copy(PACKAGE.parent / module, package)
    (package / "__init__.py").touch()
    # A file where the cache directory would be: also root, who ignores permissions, cannot write there.
    (package / "compression" / "kernels" / "__pycache__").touch()
    code = """
import numpy as np
from paceline.compression.kernels.accumulate import accumulate
residual = np.ones(3, np.float32)
accumulate(np.ones(3, np.float32), residual)
print(residual.tolist(), accumulate.stats.cache_path)
"""
    nowhere = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/cache", "NUMBA_CACHE_DIR": ""}
    assert run(code, tmp_path, **nowhere) == "[2.0, 2.0, 2.0] None\n"
