"""Classes and functions of other packages are found by name: registered, by entry points, and by import paths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import extensions
from paceline.compression import make
from paceline.consistency.weighting import find_weighting
from paceline.errors import ConfigError
from paceline.launch import backend, names
from paceline.observe import tracking
from paceline.updaters import is_whole_tensor, known_names, make_spec
from paceline.updaters.classes import find_class, name_of_class

_MODULE = """
import torch
import paceline

print("imported")

def root(staleness, history):
    return staleness**-0.5

class Lion(torch.optim.SGD):
    elementwise = True

class Launcher:
    submit = None
"""

_RAISING = """
class Mute(Exception):
    def __str__(self):
        raise OSError

if KIND == "mute":
    raise Mute
if KIND == "exits":
    raise SystemExit("bye")
if KIND == "raises":
    raise RuntimeError("no licence")

class Tool:
    def __init__(self, *arguments):
        raise RuntimeError("not today")
"""

_ENTRY_POINTS = """
[paceline.weightings]
root = found_extras:root
lost = found_extras:nothing
none = found_extras:root

[paceline.updaters]
Lion9 = found_extras:Lion

[paceline.launchers]
balloon = found_extras:Launcher
mute = found_mute:Tool
exits = found_exits:Tool
raises = found_raises:Tool
refuses = found_refuses:Tool

[paceline.trackers]
refuses = found_refuses:Tool
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with entry points, installed in a folder."""
    (tmp_path / "found_extras.py").write_text(_MODULE)
    for kind in ("mute", "exits", "raises", "refuses"):
        (tmp_path / f"found_{kind}.py").write_text(f"KIND = '{kind}'\n{_RAISING}")
    folder = tmp_path / "found_extras-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: found-extras\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(_ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for kind in extensions.GROUPS:
        monkeypatch.setitem(extensions._registered, kind, extensions.registered(kind))
    yield
    sys.modules.pop("found_extras", None)


@pytest.mark.usefixtures("installed")
def test_package_is_imported_when_its_name_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "root" in extensions.names("weighting")
    assert "Lion9" in known_names()
    assert "balloon" in names()
    assert capsys.readouterr().out == ""
    assert find_weighting("root")(4, (1, 1.0)) == 0.5
    assert capsys.readouterr().out == "imported\n"
    assert type(backend("balloon")).__name__ == "Launcher"


@pytest.mark.usefixtures("installed")
def test_updater_of_a_package_goes_by_its_name_and_says_whether_it_may_be_cut() -> None:
    spec = make_spec("lion9", lr=0.5)
    assert spec.name == "Lion9"
    assert not is_whole_tensor("Lion9")
    assert name_of_class(find_class("Lion9")) == "Lion9"
    with pytest.raises(TypeError, match="has no option 'lrr'; did you mean 'lr'"):
        make_spec("Lion9", lrr=0.5)


@pytest.mark.usefixtures("installed")
def test_name_of_ours_is_not_taken_by_a_package() -> None:
    assert find_weighting("none")(4, (1, 1.0)) == 1.0


@pytest.mark.usefixtures("installed")
def test_entry_point_that_leads_nowhere_is_named_with_its_package() -> None:
    with pytest.raises(ValueError, match="weighting 'lost' of the package found-extras cannot be imported"):
        find_weighting("lost")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mute", r"package found-extras cannot be imported: found_mute.Mute: .* \(.*found_mute.py, line 8\)"),
        ("exits", r"cannot be imported: SystemExit: bye \(.*found_exits.py, line 10\)"),
        ("raises", r"cannot be imported: RuntimeError: no licence \(.*found_raises.py, line 12\)"),
        ("refuses", r"launcher 'refuses' cannot be used: RuntimeError: not today \(.*found_refuses.py, line 16\)"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_error_of_a_package_is_told_with_its_place(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        backend(name)


@pytest.mark.usefixtures("installed")
def test_tracker_that_cannot_be_made_is_told_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"tracker 'refuses' cannot be used: RuntimeError: not today \(.*, line 16\)"):
        tracking.make("refuses:there")


def test_errors_of_ours_are_not_explained_again() -> None:
    def refuse() -> None:
        raise ConfigError("as it is")

    with pytest.raises(ConfigError, match=r"^as it is$"):
        extensions.made("a tool", refuse)


def test_unknown_name_gets_the_nearest_one_and_the_ways_to_add_it() -> None:
    with pytest.raises(ValueError, match=r"unknown weighting 'invers'; did you mean 'inverse'\? Your own.*--allow"):
        find_weighting("invers")
    with pytest.raises(ValueError, match=r"unknown codec '3bit'; did you mean '[12]bit'\?.*paceline\.codecs"):
        make("3bit")


def test_kind_that_does_not_exist_and_things_without_a_name_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing of the kind 'codecs' can be registered; did you mean 'codec'"):
        extensions.register("codecs")
    with pytest.raises(ValueError, match="has no name; give the updater one"):
        extensions.register("updater")(type("Nameless", (), {}))


@pytest.mark.parametrize("path", ["mylib", "mylib:", ":Lion", "paceline.updaters:Nope", "no.where:Lion"])
def test_import_path_that_leads_nowhere_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"no import path|cannot be imported"):
        extensions.load_all(f"paceline.updaters:make_spec, {path}")


def test_same_class_imported_twice_is_no_conflict() -> None:
    def make_class() -> type:
        return type("Twice", (), {"name": "twice", "__module__": "mylib", "__qualname__": "Twice"})

    before = dict(extensions._registered["codec"])
    try:
        extensions.register("codec")(make_class())
        again = extensions.register("codec")(make_class())
        assert extensions.find("codec", "twice") is again
    finally:
        extensions._registered["codec"] = before
