"""Pages of the site; ``make docs`` builds it, and fails where a link leads nowhere or a public name has no place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.site.pages import CONTENTS, Reference, contents, page_of, references, with_links, with_lists


@pytest.mark.parametrize(
    ("source", "link", "on_the_site"),
    [
        ("README.md", "docs/security.md", "security.md"),
        ("README.md", "docs/security.md#what", "security.md#what"),
        ("docs/tutorials/machines.md", "../launching.md", "../launching.md"),
        ("docs/tutorials/machines.md", "../../README.md", "../index.md"),
        ("docs/unequal.md", "unequal-measured.png", "unequal-measured.png"),
        ("docs/mxnet.md", "../examples/train_mnist.py", "https://github.com/paceline/paceline/blob/main/examples/train_mnist.py"),
        ("docs/mxnet.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/mxnet.md", "#here", "#here"),
    ],
)  # fmt: skip
def test_links_of_a_document_work_on_the_site(source: str, link: str, on_the_site: str) -> None:
    assert with_links(f"see [it]({link}).", source) == f"see [it]({on_the_site})."


def test_page_that_stands_nowhere_comes_among_the_guides(tmp_path: Path) -> None:
    (tmp_path / "tutorials").mkdir()
    for name in ("index", "tutorials/first", "new", "settings"):
        (tmp_path / f"{name}.md").touch()
    found = dict(re.findall(r":caption: (.*)\n\n([^`]*)", contents(tmp_path)))
    assert found["Guides"].split() == [*CONTENTS["Guides"], "new"]
    assert found["Reference"].split() == CONTENTS["Reference"]


def test_every_public_name_is_described_once_or_says_where() -> None:
    pages = {page.name: page for page in references()}
    described = [name for page in pages.values() for name in page.described]
    assert len(set(described)) == len(described)
    assert "paceline.DistributedOptimizer" in described
    assert pages["paceline.optim"].elsewhere["DistributedOptimizer"] == "{py:obj}`paceline.DistributedOptimizer`"
    assert pages["paceline"].elsewhere["kvstore"] == "{py:mod}`paceline.kvstore`"


def test_page_of_a_module_leaves_out_the_names_that_it_lists() -> None:
    text = Reference("paceline.thing", ["paceline.thing.Thing"], {"Other": "`1`"}).text()
    assert ":exclude-members: Other\n" in text
    assert "| `Other` | `1` |" in text


def test_tables_of_docstrings_become_those_of_sphinx() -> None:
    lines = ["A rule:", "", "| event | effect |", "|---|---|", "| push | none |", "", "End."]
    with_lists(None, "", "", None, None, lines)
    assert lines == [
        "A rule:", "", ".. list-table::", "   :header-rows: 1", "", "   * - event", "     - effect", "   * - push",
        "     - none", "", "End.",
    ]  # fmt: skip


def test_texts_of_the_root_have_pages() -> None:
    assert (page_of("README.md"), page_of("docs/settings.md"), page_of("src/paceline/__init__.py")) == (
        "index.md",
        "settings.md",
        None,
    )
