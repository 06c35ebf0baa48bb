"""Imports point one way, private names stay in their package, tests mirror the tree, and what must start fast does."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent
TESTS = Path(__file__).parent

#: From the lowest. A module imports its own package and lower layers; packages of one layer do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "naming"),
    ("config", "extensions"),
    ("host", "layout", "torch_hooks"),
    ("consistency", "wire"),
    ("hetero", "observe"),
    ("membership",),
    ("updaters", "compression", "net"),
    ("scheduler", "server", "worker"),
    ("collectives",),
    ("kvstore",),
    ("data",),
    ("optim",),
    ("hvd", "ddp"),
    ("mx",),
    ("gluon",),
    ("saving",),
    ("lightning", "launch", "sim"),
    ("testing", "cli"),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PURE = {
    "consistency",
    "data.dealt",
    "layout.placement",
    "host.start_clock",
    "host.own_time",
    "layout.local_merge",
    "layout.ranges",
    "membership",
    "kvstore.agreement",
    "wire",
    "hetero",
    "observe.account",
    "observe.chrome",
    "observe.clocks",
    "observe.detector",
    "observe.events",
    "observe.history",
    "observe.job_figures",
    "observe.page",
    "observe.prometheus",
    "observe.job_view",
    "observe.servers",
    "observe.page_history",
    "observe.story",
    "observe.event_order",
    "observe.verdicts",
}
IMPURE = {
    "socket", "threading", "time", "random", "torch", "cryptography", "secrets", "asyncio", "selectors", "datetime",
}  # fmt: skip
#: Folders of tests that belong to no package.
ACROSS = {"engines", "clusters", "integration", "oracle", "blame", "busy", "soak", "docs", "examples", "benchmarks"}
ACROSS |= {"browser"}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("paceline", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name in it or nothing) of all imports of a file, wherever in it, for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module, path
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in MODULES else (node.module, alias.name)


IMPORTS = {name: sorted(set(imported(path))) for name, path in MODULES.items()}
#: Only modules of ours.
ARROWS = {name: {one for one, _ in imports if one in MODULES} - {name} for name, imports in IMPORTS.items()}
INNER = [name for name in MODULES if name != "paceline"]


def top(module: str) -> str:
    return module.split(".")[1]


def is_pure(module: str) -> bool:
    return top(module) in PURE or module.removeprefix("paceline.") in PURE


def package(module: str) -> str:
    return module if module in PACKAGES else module.rpartition(".")[0]


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the nodes of a circle, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_at_most_eight_modules_stand_loose_at_the_top() -> None:
    assert len([name for name in INNER if name not in PACKAGES and name.count(".") == 1]) <= 8


def test_all_layers_exist_and_every_module_belongs_to_one() -> None:
    assert {top(name) for name in INNER} == set(RANK)


def test_imports_point_down() -> None:
    """Thus the core imports no door, and packages of one layer do not know each other."""
    arrows = [(one, other) for one in INNER for other in ARROWS[one] - {"paceline"} if top(other) != top(one)]
    assert [(one, other) for one, other in arrows if RANK[top(other)] >= RANK[top(one)]] == []


def test_there_is_no_circle_of_modules() -> None:
    # The top module imports the others when their names are used.
    assert circle({name: others - {"paceline"} for name, others in ARROWS.items() if name != "paceline"}) == []


def test_there_is_no_circle_of_packages() -> None:
    """A package inside of another one counts as one with all that it holds."""
    assert [found for parent in sorted(PACKAGES) if (found := circle(inside(parent)))] == []


def inside(parent: str) -> dict[str, set[str]]:
    """Return which modules and packages of a package import which others of it."""
    depth = parent.count(".") + 2
    graph: dict[str, set[str]] = {}
    for name, others in ARROWS.items():
        if name.startswith(parent + "."):
            node = ".".join(name.split(".")[:depth])
            ours = {".".join(one.split(".")[:depth]) for one in others if one.startswith(parent + ".")}
            graph.setdefault(node, set()).update(ours - {node})
    return graph


def test_private_names_stay_in_their_package() -> None:
    foreign = [
        (module, one, name)
        for module, imports in IMPORTS.items()
        for one, name in imports
        if one in MODULES and package(one) != package(module)
    ]
    assert foreign
    assert [found for found in foreign if any(is_private(part) for part in (*found[1].split("."), found[2]))] == []


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def test_pure_modules_know_no_socket_thread_clock_or_chance() -> None:
    pure = [(name, one) for name in INNER if is_pure(name) for one, _ in IMPORTS[name]]
    assert [(name, one) for name, one in pure if one.split(".")[0] in IMPURE] == []


def test_tests_mirror_the_tree() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path()}
    mirrored = {folder for folder in folders if folder.parts[0] not in ACROSS}
    assert not {folder for folder in mirrored if ".".join(("paceline", *folder.parts)) not in PACKAGES}
    single = {path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")} - {"layers"}
    assert not {name for name in single if f"paceline.{name}" not in set(MODULES) - PACKAGES}


def test_docstrings_name_modules_that_exist() -> None:
    found = []
    for module, path in MODULES.items():
        text, inside = path.read_text(), package(module)
        for name in re.findall(r":mod:`~?(\.?[\w.]+)`", text):
            found.append((module, f"{inside}{name}" if name.startswith(".") else name))
        for cells in re.findall(r"^\| module \|.*\n\|.*((?:\n\| [^|]*\|.*)*)", text, re.MULTILINE):
            for name in re.findall(
                r"``([\w.]+)``", " ".join(line.split("|")[1] for line in cells.strip().splitlines())
            ):
                found.append((module, name if "." in name else f"{inside}.{name}"))
    absent = [(module, name) for module, name in found if name.startswith("paceline") and name not in MODULES]
    assert found
    assert not absent


def test_what_must_start_fast_starts_without_torch() -> None:
    code = (
        "import sys, threading, paceline.launch, paceline.cli\n"
        "import paceline.consistency, paceline.membership, paceline.wire\n"
        "assert threading.active_count() == 1, 'it starts a thread'\n"
        "sys.exit(', '.join({'torch', 'numba', 'cryptography'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
