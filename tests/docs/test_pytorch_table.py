"""Every line of the tables in docs/pytorch.md and docs/weights.md is a test, and says what the test says."""

from __future__ import annotations

import re

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


def test_every_line_names_what_shows_it_and_says_what_is_tried() -> None:
    for line, worker, server, shown in ROWS:
        names = names_in(shown)
        assert names, line
        assert [name for name in names if name not in SCRIPTS and not named_tests(f"`{name}`")] == [], line
        for script in (SCRIPTS[name] for name in names if name in SCRIPTS):
            assert (word_of(worker), word_of(server)) == (EXPECTED[script.worker], EXPECTED[script.server]), line
            assert script.server != "at step" or re.search("step|pushed", server), line


def test_weights_of_batches_are_shown_by_rows_that_weigh_so() -> None:
    named = set()
    for _, weight, shown in rows("docs/weights.md", "## Loops, and what they count", "shown by"):
        names = names_in(shown)
        assert names
        named |= set(names)
        warns = any(WEIGHED[name].says for name in names)
        assert weight == "as the batch" or warns == ("with a warning" in weight)
    assert named <= WEIGHED.keys()


def test_every_loop_is_in_the_table() -> None:
    assert set(SCRIPTS) - {name for row in ROWS for name in names_in(row[3])} == set()
