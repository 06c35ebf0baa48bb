"""Each row of the table of docs/security.md names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("| ") and "::" in line]
WHO = ("network", "other user", "holder of the key", "member")


def test_table_has_rows_for_all_who_are_named() -> None:
    table = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith(WHO_STARTS)]
    assert table == ROWS
    assert {row.split("|")[1].strip() for row in ROWS} == set(WHO)


WHO_STARTS = tuple(f"| {who} |" for who in WHO)


@pytest.mark.parametrize("row", ROWS)
def test_row_names_a_test_that_exists(row: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
    assert named, row
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path} has no {name}"


UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}


def uses_pickle(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] in UNSAFE for name in names):
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            return True
    return False


def test_only_the_modules_that_the_page_names_unpickle() -> None:
    source = ROOT / "src/paceline"
    found = {str(path.relative_to(source)) for path in source.rglob("*.py") if uses_pickle(path)}
    [rows] = re.findall(r"\*\*Pickle\.\*\*.*?\n\n(.*?)\n\n", (ROOT / "docs/security.md").read_text(), re.DOTALL)
    assert found == set(re.findall(r"`(hvd/\w+\.py)`", rows))
