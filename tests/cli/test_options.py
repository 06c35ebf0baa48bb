from __future__ import annotations

import pytest

from paceline.cli.options import Option, Parser, UsageError, split_command

OPTIONS = (
    Option(("-n", "--number"), "a number", "N", int),
    Option(("--env",), "variables", "NAME=VALUE", repeat=True),
    Option(("--dry-run",), "a switch"),
)


@pytest.mark.parametrize(
    ("words", "ours", "command"),
    [
        ("-n 2 -- python x.py", "-n 2", "python x.py"),
        ("-n 2 python x.py -n 3", "-n 2", "python x.py -n 3"),
        ("-n2 --dry-run python -- x", "-n2 --dry-run", "python -- x"),
        ("--number=2 --env A=1 --env B=2 sh -c ls", "--number=2 --env A=1 --env B=2", "sh -c ls"),
        ("-n -1 x", "-n -1", "x"),
        ("-- --dry-run", "", "--dry-run"),
        ("-n", "-n", ""),
        ("", "", ""),
        ("--unknown x", "--unknown", "x"),
    ],
)
def test_command_begins_after_two_dashes_or_with_the_first_other_word(words: str, ours: str, command: str) -> None:
    assert split_command(words.split(), OPTIONS) == (ours.split(), command.split())


def parse(*words: str) -> object:
    return Parser("launch", OPTIONS, "usage", "description").parse(words)


def test_options_are_parsed_by_their_type() -> None:
    assert vars(parse("-n", "3", "--env", "A=1", "--env", "B=2")) == {
        "number": 3,
        "env": ["A=1", "B=2"],
        "dry_run": False,
    }
    assert vars(parse("--dry-run"))["env"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dryrun"], "unknown option '--dryrun'; did you mean '--dry-run'?"),
        (["--numbr=3"], "unknown option '--numbr=3'; did you mean '--number'?"),
        (["--num", "3"], "unknown option '--num'"),
        (["-n", "two"], "'two' is not a whole number"),
        (["-n"], "-n/--number: needs a value after it"),
        (["word"], "unexpected word 'word'"),
    ],
)
def test_wrong_option_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*words)
    assert message in str(caught.value)
