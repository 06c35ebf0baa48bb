"""Golden files: what a plan looked like when somebody last read it.

``PACELINE_TEST_GOLDEN=write pytest FILE`` writes them anew; read the difference before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path


def check(file: Path, text: str) -> None:
    """Compare a text with a golden file."""
    if os.environ.get("PACELINE_TEST_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), f"{file.name} differs; PACELINE_TEST_GOLDEN=write writes it anew"
