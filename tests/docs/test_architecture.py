"""What docs/architecture.md says of packages, files and names is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.drawing import drawing, drawn

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/paceline"
TEXT = (ROOT / "docs/architecture.md").read_text()
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
#: Files that the documents name as a user's, or that jobs write.
NOT_OURS = {"train.py", "resume.py", "job.ckpt", "job.ckpt.rank<r>.*"}
#: Files of the package that CONTRIBUTING.md writes, each named before its text.
EXAMPLE_PACKAGE = re.compile(r"^`((?:mypace|tests)/\w+\.py)`", re.MULTILINE)
_STOP = re.compile(r"^(\d)\. `([\w/]+\.py)` `([\w.]+)`: ", re.MULTILINE)


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def code(document: str) -> set[str]:
    """Every inline piece of code of a document; blocks and new files have their own tests."""
    text = re.sub(r"```.*?```|^New file [^\n]*", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([^`\n]+)`", text))


def definitions(path: Path) -> set[str]:
    """Names of the classes and functions of a file, methods and fields as ``Class.name``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for one in ast.walk(node):
                if isinstance(one, ast.FunctionDef):
                    found.add(f"{node.name}.{one.name}")
                elif isinstance(one, ast.AnnAssign | ast.Assign):
                    targets = [one.target] if isinstance(one, ast.AnnAssign) else one.targets
                    found |= {f"{node.name}.{re.sub('^self[.]', '', ast.unparse(each))}" for each in targets}
    return found


DEFINED = {name for path in SOURCES.rglob("*.py") for name in definitions(path)}


# ---- paths and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document: str) -> None:
    named = {one.split("::")[0] for one in code(document)}
    paths = {one for one in named if re.fullmatch(r"[\w./-]+(\.(py|md|toml|png|ckpt)|/)", one)} - NOT_OURS
    paths -= set(EXAMPLE_PACKAGE.findall((ROOT / document).read_text()))
    missing = {one for one in paths if not (ROOT / one).exists() and not (SOURCES / one).exists()}
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    path = ROOT / document
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", path.read_text()):
        linked = path.parent / target if target else path
        assert linked.exists(), f"{document} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            known = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in known, f"{document} links to #{anchor}"


def test_every_class_and_method_exists() -> None:
    named = {one.split("(")[0].removeprefix("paceline.consistency.") for one in code("docs/architecture.md")}
    ours = {one for one in named if re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)?", one)}
    others = {"SparseAdam", "NotImplementedError", "Noise_NNpsk0_25519_AESGCM_SHA256"}
    assert ours - DEFINED == others, "those of torch, Python and Noise"


# ---- packages --------------------------------------------------------------------------------------------------------


def test_tree_has_every_package_and_module_once() -> None:
    lines = re.findall(r"^    (\S.*)$", section("Packages").split("\nAn arrow")[0], re.MULTILINE)
    listed = [name for line in lines for name in re.split(" {2,}", line)[0].split(", ")]
    there = [f"{path.name}/" for path in SOURCES.iterdir() if (path / "__init__.py").exists()]
    there += [path.name for path in SOURCES.glob("*.py")]
    assert sorted(name for name in listed if name.count("/") < 2) == sorted(there)
    assert all((SOURCES / name).exists() for name in listed)


def test_drawing_of_the_packages_is_what_they_import() -> None:
    assert drawn() == drawing(), "run python -m tests.docs.drawing"


# ---- one gradient and the words --------------------------------------------------------------------------------------


def test_way_of_one_gradient_has_at_most_eight_stops_that_exist() -> None:
    stops = _STOP.findall(section("The way of one gradient"))
    assert [int(number) for number, _, _ in stops] == list(range(1, len(stops) + 1))
    assert 5 <= len(stops) <= 8
    assert len(re.findall(r"^\d\. ", section("The way of one gradient"), re.MULTILINE)) == len(stops)
    for _, path, name in stops:
        assert name in definitions(SOURCES / path), f"{path} has no {name}"


def test_glossary_has_each_word_once() -> None:
    rows = [line.split(" | ") for line in section("Glossary").splitlines() if line.startswith("| ")][1:]
    words = [word.strip(" |") for row in rows for word in row[0].split(",")]
    assert len(words) == len(set(words)) > 40
    assert all(len(row) == 2 and len(row[1]) > 10 for row in rows)
