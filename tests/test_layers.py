"""Imports point one way, private names stay in their package, tests mirror the tree, and what must start fast does."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

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
#: What every product needs.
CORE = {
    "kvstore",
    "collectives",
    "data",
    "torch_hooks",
    "optim",
    "worker",
    "server",
    "scheduler",
    "wire",
    "updaters",
    "compression",
    "consistency",
}
PRODUCTS = {"hvd", "ddp", "mx", "gluon", "lightning", "launch", "sim", "cli", "testing"}
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


@pytest.mark.parametrize("module", INNER)
def test_imports_point_down(module: str) -> None:
    others = {name for name in ARROWS[module] - {"paceline"} if top(name) != top(module)}
    assert not {name for name in others if RANK[top(name)] >= RANK[top(module)]}


def test_there_is_no_circle_of_modules() -> None:
    # The top module imports the others when their names are used.
    assert circle({name: others - {"paceline"} for name, others in ARROWS.items() if name != "paceline"}) == []


@pytest.mark.parametrize("parent", sorted(PACKAGES))
def test_there_is_no_circle_of_packages(parent: str) -> None:
    """A package inside of another one counts as one with all that it holds."""
    depth = parent.count(".") + 2

    def inside(module: str) -> str:
        return ".".join(module.split(".")[:depth])

    graph: dict[str, set[str]] = {}
    for name, others in ARROWS.items():
        if name.startswith(parent + "."):
            ours = {inside(one) for one in others if one.startswith(parent + ".")}
            graph.setdefault(inside(name), set()).update(ours - {inside(name)})
    assert circle(graph) == []


@pytest.mark.parametrize("module", list(MODULES))
def test_private_names_stay_in_their_package(module: str) -> None:
    foreign = [(one, name) for one, name in IMPORTS[module] if one in MODULES and package(one) != package(module)]
    private = [(one, name) for one, name in foreign for part in (*one.split("."), name) if is_private(part)]
    assert not private


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


@pytest.mark.parametrize("module", [name for name in INNER if is_pure(name)])
def test_pure_module_knows_no_socket_thread_clock_or_chance(module: str) -> None:
    assert not {name.split(".")[0] for name, _ in IMPORTS[module]} & IMPURE


@pytest.mark.parametrize("module", [name for name in INNER if top(name) in CORE])
def test_core_imports_no_door(module: str) -> None:
    assert not {top(name) for name in ARROWS[module] - {"paceline"}} & PRODUCTS


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


@pytest.mark.parametrize(
    "module",
    ["paceline", "paceline.launch", "paceline.cli", "paceline.consistency", "paceline.membership", "paceline.wire"],
)
def test_module_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(', '.join({{'torch', 'numba', 'cryptography'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_importing_paceline_starts_no_thread() -> None:
    code = "import paceline, threading; raise SystemExit(threading.active_count() - 1)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
