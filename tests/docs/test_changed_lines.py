"""The lines that ``tests/mutations.py`` changes are there, once each, and so are the tests that guard them."""

from __future__ import annotations

from tests.mutations import AREAS, ROOT


def test_each_line_is_there_once_and_its_tests_are_there() -> None:
    for area in AREAS:
        text = (ROOT / "src" / "paceline" / area.file).read_text()
        assert [before for before, _ in area.changes if text.count(before) != 1] == [], area.file
        for test in area.tests:
            file, _, name = test.partition("::")
            path = ROOT / "tests" / file
            assert path.exists(), test
            assert name.partition("[")[0] in (path.read_text() if path.is_file() else ""), test
