"""The page on planning."""

from __future__ import annotations

from benchmarks.plan import PAGE, command, shown, table


def test_page_has_the_output_of_its_command() -> None:
    page = PAGE.read_text()
    assert shown(command(page)) == table(page)
    assert PAGE.with_name("planning.png").exists()
