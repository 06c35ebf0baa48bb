"""Imports point one way, and what must start fast starts without torch."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
#: From the lowest; a module imports its own layer and those below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "config", "exitcodes", "context", "logs", "naming"),
    ("consistency", "placement", "local_merge", "ranges", "interval_map", "membership", "agreement", "wire"),
    ("updaters", "tensors", "keys", "compression", "transport"),
    ("arguments",),
    ("peer",),
    ("scheduler", "server", "worker"),
    ("kvstore",),
    ("optim", "gluon", "data"),
    ("saving",),
    ("lightning", "launch", "testing"),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PURE = LAYERS[1]
IMPURE = {"socket", "threading", "time", "random", "torch", "zmq", "secrets", "asyncio", "selectors", "datetime"}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("paceline", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(path: Path) -> list[str]:
    """Every module that a file imports, wherever in it, for type checkers too."""
    names: list[str] = []
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: imports are absolute"  # noqa: PT018
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            submodules = [name for name in inner if name in MODULES]
            names += submodules
            if len(submodules) < len(inner):
                names.append(node.module)
        todo.extend(ast.iter_child_nodes(node))
    return names


IMPORTS = {name: imports_of(path) for name, path in MODULES.items()}


def top(module: str) -> str:
    return module.split(".")[1]


def test_every_module_belongs_to_a_layer() -> None:
    assert {top(name) for name in MODULES if name != "paceline"} <= set(RANK)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "paceline"])
def test_imports_point_down(module: str) -> None:
    ours = [name for name in IMPORTS[module] if name.startswith("paceline.")]
    upward = [name for name in ours if RANK[top(name)] > RANK[top(module)]]
    assert not upward


def test_there_is_no_import_cycle() -> None:
    graph = {
        name: {one for one in imports if one in MODULES and one != name and not name.startswith(one + ".")}
        for name, imports in IMPORTS.items()
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) >= set(MODULES)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "paceline" and top(name) in PURE])
def test_pure_module_knows_no_socket_thread_clock_or_chance(module: str) -> None:
    assert not {name.split(".")[0] for name in IMPORTS[module]} & IMPURE


@pytest.mark.parametrize(
    "module",
    ["paceline", "paceline.launch", "paceline.cli", "paceline.consistency", "paceline.membership", "paceline.wire"],
)
def test_module_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(', '.join({{'torch', 'numba', 'zmq'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_importing_paceline_starts_no_thread() -> None:
    code = "import paceline, threading; raise SystemExit(threading.active_count() - 1)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
