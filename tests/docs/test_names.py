"""Names in the documents are those of the code: links, files, modules, tests, commands, options, variables, rooms."""

from __future__ import annotations

import ast
import pkgutil
import re
from typing import Any

from paceline.cli.app import COMMANDS
from paceline.cli.completion import options_of
from paceline.extensions import GROUPS
from tests.docs.pages import ROOT, SOURCES, TEXTS, code, functions, named_tests, rows
from tests.test_layers import RANK

ALL = "\n".join(TEXTS.values())
CODE = "\n".join(path.read_text() for path in SOURCES.rglob("*.py"))
FLAGS = {flag for command in COMMANDS for option in options_of(command) for flag in option.flags} | {"--help"}
#: Flags of the examples' scripts.
EXAMPLE_FLAGS = {
    flag
    for path in (ROOT / "examples").rglob("*.py")
    for flag in re.findall(r'add_argument\([^)]*?"(--[a-z][\w-]*)"', path.read_text())
}
#: Names of others: pip, mpirun, pytest, ray and torchrun; users' and jobs' files; torch, Python and Noise.
FOREIGN_FLAGS = {"--index-url", "--version", "--short", "--mca", "--labels"}
FOREIGN_FLAGS |= {"--nnodes", "--node-rank", "--master-addr", "--rdzv-backend", "--rdzv-endpoint", "--standalone"}
FOREIGN_FLAGS |= {"--local-addr", "--redirects", "--tee", "--multiprocessing-distributed"}
FOREIGN_FILES = {"train.py", "resume.py", "job.ckpt", "job.ckpt.rank<r>.*", "models/resnet20-0250.ckpt"}
FOREIGN_FILES |= {name for text in TEXTS.values() for name in re.findall(r"Save\s+this\s+as\s+`([\w.]+)`", text)}
FOREIGN_CLASSES = {"SparseAdam", "NotImplementedError", "Noise_NNpsk0_25519_AESGCM_SHA256"}
#: Files of the package that docs/extending.md writes, each named before its text.
EXAMPLE_PACKAGE = re.compile(r"^`((?:mypace|tests)/\w+\.py)`", re.MULTILINE)
PUBLIC = re.compile(r"\bpaceline(?:\.\w+)+")
#: Suites of noxfile.py.
NOX = (ROOT / "noxfile.py").read_text()
SESSIONS = {name.replace("_", "-") for name in re.findall(r"^def (\w+)\(session", NOX, re.MULTILINE)}


def defined(node: Any, prefix: str = "") -> set[str]:
    """Names of classes and functions, methods and fields as ``Class.name``."""
    found: set[str] = set()
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            found.add(prefix + one.name)
        if isinstance(one, ast.ClassDef):
            found |= defined(one, f"{one.name}.")
            set_there = [each for each in ast.walk(one) if isinstance(getattr(each, "ctx", None), ast.Store)]
            found |= {f"{one.name}.{ast.unparse(each).removeprefix('self.')}" for each in set_there}
    return found


DEFINED = {name for path in SOURCES.rglob("*.py") for name in defined(ast.parse(path.read_text()))}


# ---- named in a document, there in the code --------------------------------------------------------------------------


def test_every_link_leads_somewhere() -> None:
    for document, text in TEXTS.items():
        path = ROOT / document
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", text):
            linked = path.parent / target if target else path
            assert linked.exists(), f"{document} links to {target}"
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE) if anchor else ()
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in {"", *anchors}, f"{document} links to {target}#{anchor}"


def test_every_path_and_test_exists() -> None:
    for document, text in TEXTS.items():
        named = {one.split("::")[0] for one in code(document)} - FOREIGN_FILES
        paths = {one for one in named if re.fullmatch(r"[\w./-]+(\.(py|md|toml|png|ckpt)|/)", one)}
        paths -= set(EXAMPLE_PACKAGE.findall(text))
        assert {one for one in paths if not (ROOT / one).exists() and not (SOURCES / one).exists()} == set(), document
        assert [(path, name) for path, name in named_tests(text) if name not in functions(path)] == [], document
        assert [row for row in rows(document, column="test") if not named_tests(row[-1])] == [], document


def test_every_public_name_exists() -> None:
    named = {name for document in TEXTS for one in code(document) for name in PUBLIC.findall(one)}
    for name in named - set(GROUPS.values()):
        assert pkgutil.resolve_name(name), name


def test_every_command_option_and_target_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document, text in TEXTS.items():
        fenced = "".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
        indented = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
        shown = [*code(document), *fenced.splitlines(), *indented]
        calls = [match for one in shown if (match := re.match(r"\W*paceline ([a-z]+)(.*)", one))]
        assert {call[1] for call in calls if call[2][:1] in (" ", "")} <= COMMANDS.keys(), document
        own = [re.split(" -- | python ", call[2])[0] for call in calls]
        own += [one for one in code(document) if one.startswith("--")]
        flags = {flag for one in own for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", one)}
        assert flags <= FLAGS | EXAMPLE_FLAGS | FOREIGN_FLAGS, document
        assert {target for one in shown for target in re.findall(r"^make ([\w-]+)", one)} <= targets, document
        assert {name for one in shown for name in re.findall(r"\bnox -s ([\w-]+)", one)} <= SESSIONS, document


def test_every_variable_exists() -> None:
    named = set(re.findall(r"\b(?:PACELINE|DMLC|MXNET|HOROVOD)_[A-Z_]*[A-Z]\b", ALL))
    settings = {f"PACELINE_{row[0].strip('`').upper()}" for row in rows("docs/settings.md")}
    assert {name for name in named if name not in CODE} <= settings


def test_every_class_and_method_exists() -> None:
    texts = [document for document in TEXTS if document.startswith("docs/architecture")]
    named = {one.split("(")[0].removeprefix("paceline.consistency.") for document in texts for one in code(document)}
    ours = {one for one in named if re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)?", one)}
    assert ours - DEFINED <= FOREIGN_CLASSES


# ---- there in the code, named in a document --------------------------------------------------------------------------


def test_every_command_and_option_of_launch_is_documented() -> None:
    called_by_the_launcher = {"run", "agent"}
    assert {one for one in COMMANDS if f"paceline {one}" not in ALL} <= called_by_the_launcher
    for option in options_of("launch"):
        assert any(re.search(rf"(?<![\w-]){flag}(?![\w-])", ALL) for flag in option.flags), option.name


def test_every_variable_of_horovod_and_mxnet_that_counts_is_documented() -> None:
    read = set(re.findall(r"\"((?:HOROVOD|MXNET|DMLC)_[A-Z_]*[A-Z])\"", CODE))
    assert {name for name in read if name not in ALL} == {"HOROVOD_JOB_ID"}, "Horovod's launcher sets that"


def test_table_of_rooms_has_every_room_once_and_lower_ones_above() -> None:
    cells = " ".join(row[0] for row in rows("docs/architecture.md", "## Rooms"))
    rooms = [name.removesuffix(".py") for name in re.findall(r"`(\w+(?:/|\.py))`", cells)]
    rooms = [name.removesuffix("/") for name in rooms if name != "__init__"]
    assert sorted(rooms) == sorted(RANK)
    assert [RANK[name] for name in rooms] == sorted(RANK.values())


def test_glossary_has_each_word_once() -> None:
    words = [word for row in rows("docs/architecture/glossary.md") for word in row[0].split(", ")]
    assert len(words) == len(set(words))
