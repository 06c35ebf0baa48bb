"""The documents, and pieces of them that tests compare with the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/paceline"
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
}
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def blocks(document: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[document], re.DOTALL)


def code(document: str) -> set[str]:
    """Return every inline piece of code; blocks and new files have their own tests."""
    text = re.sub(r"```.*?```|^New file [^\n]*", "", TEXTS[document], flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([^`\n]+)`", text))


def rows(document: str, heading: str = "", column: str = "") -> list[list[str]]:
    """Return the cells of the tables below a heading whose last column has a name; without them, of all tables."""
    text = TEXTS[document].split(f"\n{heading}\n")[1].split("\n## ")[0] if heading else TEXTS[document]
    tables = re.findall(r"^\|.*\|\n\|[-|]+\|\n(?:\|.*\|\n?)*", text, re.MULTILINE)
    split = [[[cell.strip() for cell in line.strip("|").split(" | ")] for line in one.splitlines()] for one in tables]
    return [row for head, _, *found in split if column in ("", head[-1]) for row in found]


def named_tests(cell: str) -> list[tuple[str, str]]:
    """Return file and function of the tests that a cell names."""
    return _TEST.findall(cell)


@cache
def functions(path: str) -> frozenset[str]:
    """Return the functions of a file of the repository."""
    return frozenset(one.name for one in ast.parse((ROOT / path).read_text()).body if isinstance(one, ast.FunctionDef))
