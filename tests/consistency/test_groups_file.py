from __future__ import annotations

import pytest

from paceline.consistency import groups_line, name_ranks, parse_groups, resolve_groups

HOSTS = [("fast", 0), ("fast", 1), ("slow", 0), ("fe80::1", 0)]


def test_line_is_a_group_with_blanks_commas_and_comments() -> None:
    assert parse_groups("# by speed\n0, 1\n\n2\t3  # the old ones\n") == [["0", "1"], ["2", "3"]]


@pytest.mark.parametrize("text", ["", "\n\n", "# nobody\n , \n"])
def test_file_that_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names nobody"):
        parse_groups(text)


def test_file_in_one_line_is_the_file() -> None:
    assert groups_line(parse_groups("a, b  # the new ones\n2\n")) == "a b; 2;"


def test_names_of_the_launchers_hosts_become_ranks() -> None:
    assert name_ranks("slow; fast:1 3;", HOSTS) == "2; 1 3;"
    assert name_ranks("fast;10.0.0.7 other:1;", HOSTS) == "0 1; 10.0.0.7 other:1;"


def test_members_are_ranks_hosts_or_slots() -> None:
    assert resolve_groups([["0", "slow"], ["fast:1", "fe80::1"]], HOSTS) == ((0, 2), (1, 3))
    assert resolve_groups([["fast"], ["slow:0", "3"]], HOSTS) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("member", "why"),
    [("4", "workers 0 to 3"), ("fast:2", "fast:0, fast:1"), ("other", "no worker runs at 'other'"), ("²", "runs at")],
)
def test_stranger_is_named(member: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        resolve_groups([[member]], HOSTS)
