"""Only the modules that docs/security.md names unpickle."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.pages import SOURCES, TEXTS

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
    found = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if uses_pickle(path)}
    [named] = re.findall(r"\*\*Pickle\.\*\*.*?\n\n(.*?)\n\n", TEXTS["docs/security.md"], re.DOTALL)
    assert found == set(re.findall(r"`(hvd/\w+\.py)`", named))
