"""The three changes that CONTRIBUTING.md shows can be made as it says: each is applied to a copy and tested there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
_NEW = re.compile(r"New file `([^`]+)`:\n\n```python\n(.*?)```", re.DOTALL)
_CHANGED = re.compile(r"^In `([^`]+)`(?:(?!^```).)*?:\n\n```diff\n(.*?)```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """What one section says."""

    new: dict[str, str]
    changed: dict[str, str]

    def apply(self, folder: Path) -> None:
        """Make the change in a copy of the sources."""
        for path, text in self.new.items():
            assert not (folder / path).exists(), f"{path} exists already"
            (folder / path).write_text(text)
        for path, diff in self.changed.items():
            text = (folder / path).read_text()
            for hunk in diff.strip("\n").split("\n\n"):
                before, after = (side(hunk, signs) for signs in ("- ", "+ "))
                text = put(text, before, after, path)
            (folder / path).write_text(text)


def side(hunk: str, signs: str) -> str:
    """Return the lines of a hunk before ("- ") or after ("+ ") the change."""
    return "".join(f"{line[1:]}\n" for line in hunk.split("\n") if line[:1] in signs)


def put(text: str, before: str, after: str, path: str) -> str:
    assert text.count(before) == 1, f"{path} has these lines {text.count(before)} times, not once:\n{before}"
    return text.replace(before, after)


def change(title: str) -> Change:
    section = TEXT.split(f"\n### {title}\n")[1].split("\n### ")[0]
    return Change(dict(_NEW.findall(section)), dict(_CHANGED.findall(section)))


#: Title of the section, files it touches, the tests it runs and the words that pick those of the new part.
SECTIONS = [
    ("A codec", 4, ["tests/compression/test_scaledsign.py", "tests/compression/test_codec_base.py"], "scaledsign"),
    ("A weighting", 2, ["tests/consistency/test_root_weighting.py"], "root"),
    ("A server-side optimizer", 3, ["tests/updaters/test_lion.py", "tests/updaters/test_updaters.py"], "lion"),
]


@pytest.mark.parametrize(("title", "files", "tests", "words"), SECTIONS, ids=[section[0] for section in SECTIONS])
def test_change_works_as_it_is_written(title: str, files: int, tests: list[str], words: str, tmp_path: Path) -> None:
    made = change(title)
    assert len(made.new) + len(made.changed) == files
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    made.apply(tmp_path)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", words, *tests]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
