"""The program of a worker process under test: call one function of one file, keep its result."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import config
from paceline.testing.faults import VARIABLE


def load_function(file: str, name: str) -> Callable[..., Any]:
    """Return a function of a Python file, which is run as a module of its own.

    Raises:
        ImportError: the file cannot be loaded.
        AttributeError: it has no such function.
    """
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def main(path: str) -> None:
    """Carry out the task that a JSON file describes."""
    if VARIABLE in os.environ:  # it imports torch, which a function without faults may not need
        importlib.import_module("paceline.testing.faulty").install(f"worker {os.environ[config.variable('rank')]}")
    task = json.loads(Path(path).read_text())
    sys.path.append(str(Path(task["file"]).parent))  # processes that the function spawns import its module
    result = load_function(task["file"], task["function"])(*task["arguments"])
    part = Path(task["result"] + ".part")
    part.write_text(json.dumps(result))
    part.replace(task["result"])


if __name__ == "__main__":
    main(sys.argv[1])
