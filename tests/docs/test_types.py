"""A user's script passes ``mypy --strict``, and misspelt calls do not. What a user sees is public, and only that."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_overloads, get_type_hints

import pytest

import paceline
from paceline.kvstore import KVStore, create, factory, store_types
from paceline.updaters import make_spec
from paceline.updaters.classes import known_names
from paceline.updaters.option_names import OptimizerOptions

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)  # mypy may read all of torch's types first
SCRIPTS = Path(__file__).with_name("typed")


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """Lines with errors, by file: of the two scripts, and of those in README and saving.md."""
    folder = tmp_path_factory.mktemp("typed")
    for path in SCRIPTS.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    texts = (ROOT / "README.md").read_text() + (ROOT / "docs/saving.md").read_text()
    for index, script in enumerate(re.findall(r"```python\n(.*?)```", texts, re.DOTALL)):
        (folder / f"readme{index}.py").write_text(script)
    files = sorted(map(str, folder.glob("*.py")))
    # In a process of its own: the objects that it leaves would make each collection in later tests longer. With the
    # options and the cache of `make check`, which has read torch's types.
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir=.mypy_cache/{sys.platform}", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 2: it could not check them
    found: dict[str, set[int]] = {Path(file).stem: set() for file in files}
    for name, line, text in re.findall(r"(\w+)\.py:(\d+): error: (.*)", done.stdout):
        if 'untyped function "backward"' not in text:  # torch's own
            found[name].add(int(line))
    return found


def test_script_with_every_public_call_passes(complaints: dict[str, set[int]]) -> None:
    assert complaints["right"] == set()


def test_readme_scripts_pass(complaints: dict[str, set[int]]) -> None:
    assert [complaints["readme0"], complaints["readme1"]] == [set(), set()]


def test_misspelt_names_options_and_values_are_errors(complaints: dict[str, set[int]]) -> None:
    lines = (SCRIPTS / "wrong.py").read_text().splitlines()
    assert complaints["wrong"] == {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


def test_script_has_every_public_call() -> None:
    tree = ast.parse((SCRIPTS / "right.py").read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {
        keyword.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for keyword in node.keywords if keyword.arg
    }
    methods = [*dir(KVStore), *vars(paceline.DistributedOptimizer)]
    public = {*paceline.__all__, *paceline.kvstore.__all__, *paceline.data.__all__, *methods}
    assert sorted(name for name in public - used if not name.startswith("_")) == []


def test_options_of_named_optimizers_are_those_of_their_classes() -> None:
    own = {option for name in known_names() for option in options_of(name)}
    ours = {*inspect.signature(make_spec).parameters, "rescale_grad", "clip_gradient", "learning_rate", "wd"}
    assert set(get_type_hints(OptimizerOptions)) == (own | ours) - {"optimizer", "options"} | {
        "lr_scheduler",
        "begin_num_update",
    }


def options_of(name: str) -> set[str]:
    """Return the options that an optimizer names when it is given one that it does not have."""
    with pytest.raises(TypeError, match="has no option") as caught:
        make_spec(name, **{"?": 1})
    return set(filter(None, str(caught.value).partition("known are ")[2].split(", ")))


def test_store_types_that_a_checker_knows_are_all_there_are() -> None:
    names = [eval(one.__annotations__["name"], vars(factory)) for one in get_overloads(create)]
    own = set(store_types()) - set(paceline.kvstore.KVStoreBase.registry)
    assert {kind for name in names for kind in get_args(name)} == own


@pytest.mark.parametrize(
    ("kind", "option", "text"),
    [
        ("local", "mean", "a local store has no option 'mean'; it has none"),
        ("horovod", "mean", "a horovod store has no option 'mean'; it has none"),
        ("dist_ssync", "stalenes", "a dist_ssync store has no option 'stalenes'; did you mean 'staleness'?"),
        ("dist", "staleness", "a dist store has no option 'staleness'; known are mean, namespace"),
    ],
)
def test_unknown_option_of_a_store_names_the_nearest(kind: str, option: str, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        create(kind, **{option: 1})
    assert str(caught.value) == text


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_dir_has_the_public_names_and_nothing_else() -> None:
    code = (
        "import sys, paceline; before = dir(paceline); assert 'torch' not in sys.modules\n"
        "import paceline.config, paceline.launch; assert dir(paceline) == before; print(*before)"
    )
    assert python(code).split() == sorted([*paceline.__all__, "lightning"])


def test_public_names_need_no_other_import() -> None:
    code = (
        "import os, paceline, torch\n"
        "for name in dir(paceline):\n"
        "    child = os.fork()\n"  # names that were read before import others
        "    if not child: os._exit(getattr(paceline, name, None) is None)\n"
        "    if os.waitpid(child, 0)[1]: print(name)"
    )
    assert python(code) == ""


def test_missing_extra_is_one_sentence() -> None:
    code = (
        "import sys, traceback; sys.modules['lightning.pytorch'] = None\n"
        "try:\n    import paceline.lightning\n"
        "except ImportError as error: print(''.join(traceback.format_exception(error)))"
    )
    shown = python(code)
    assert shown.count("Traceback") == 1
    assert "MissingExtraError: paceline.lightning needs lightning: pip install 'paceline[lightning]'" in shown
