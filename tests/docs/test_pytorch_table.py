"""Every line of the tables in docs/pytorch.md and docs/weights.md is a test, and says what the test says."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import named_tests, rows
from tests.integration.test_weights_of_batches import ROWS as WEIGHED
from tests.oracle.registry import all_scripts

SCRIPTS = all_scripts()


#: The lines that say something.
ROWS = [row for row in rows("docs/pytorch.md", "## The table", "shown by") if not row[0].startswith("**")]

#: What a cell begins with where a loop is refused.
EXPECTED = {"refused at once": "error at once", "refused in its step": "error", "equal": "", "at step": ""}


def word_of(cell: str) -> str:
    return "error at once" if cell.startswith("error at once") else "error" if cell.startswith("error") else ""


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_line_names_what_shows_it(row: list[str]) -> None:
    assert len(row) == 4
    assert names_in(row[3])
    assert [name for name in names_in(row[3]) if name not in SCRIPTS and not named_tests(f"`{name}`")] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_line_says_what_is_tried(row: list[str]) -> None:
    _, worker, server, shown = row
    for name in (one for one in names_in(shown) if one in SCRIPTS):
        assert word_of(worker) == EXPECTED[SCRIPTS[name].worker]
        assert word_of(server) == EXPECTED[SCRIPTS[name].server]
        assert SCRIPTS[name].server != "at step" or re.search("step|pushed", server)


def test_weights_of_batches_are_shown_by_rows_that_weigh_so() -> None:
    named = set()
    for _, weight, shown in rows("docs/weights.md", "## Loops, and what they count", "shown by"):
        names = names_in(shown)
        assert names
        named |= set(names)
        warns = any(WEIGHED[name].says for name in names)
        assert weight == "as the batch" or warns == ("with a warning" in weight)
    assert named <= WEIGHED.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_loop_is_in_the_table(name: str) -> None:
    assert any(name in names_in(row[3]) for row in ROWS)
