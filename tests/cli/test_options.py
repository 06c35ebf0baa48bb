from __future__ import annotations

import pytest

from paceline.cli.options import Option, Parser, UsageError, split_command, words_of

OPTIONS = (
    Option(("-n", "--number"), "a number", "N", int),
    Option(("--env",), "variables", "NAME=VALUE", repeat=True),
    Option(("--dry-run",), "a switch"),
    Option(("--count",), "a number of some", "N", int, least=1),
    Option(("--seconds",), "a time", "SECONDS", float, positive=True),
    Option(("--kind",), "a word", "KIND", choices=("inverse", "none")),
    Option(("--port",), "a number, or none", "PORT", int, least=0, without="0"),
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
        ("--port -- x", "--port", "x"),
        ("--port 80 x", "--port 80", "x"),
        ("--port x 80", "--port", "x 80"),
        ("--port --dry-run 80", "--port --dry-run", "80"),
        ("--port", "--port", ""),
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
        "count": None,
        "seconds": None,
        "kind": None,
        "port": None,
    }
    assert vars(parse("--dry-run"))["env"] == []
    given = [("--port",), ("--port", "--dry-run"), ("--port", "80"), ("--port=80",)]
    assert [vars(parse(*words))["port"] for words in given] == [0, 0, 80, 80]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dryrun"], "unknown option '--dryrun'; did you mean '--dry-run'?"),
        (["--numbr=3"], "unknown option '--numbr=3'; did you mean '--number'?"),
        (["--num", "3"], "unknown option '--num'"),
        (["-n", "two"], "'two' is not an integer"),
        (["-n"], "-n/--number: needs a value after it"),
        (["--number=--"], "-n/--number: needs a value after it"),
        (["--count", "0"], "--count: 0 is too small; it is at least 1"),
        (["--count", "99999999999999999999"], "--count: 1e+20 is too large; it is at most"),
        (["--count", 5000 * "9"], "--count: inf is too large"),
        (["--count", "x"], "--count: 'x' is not an integer, as in --count 2"),
        (["--seconds", "inf"], "--seconds: 'inf' is not a number above 0"),
        (["--seconds", "-1"], "--seconds: '-1' is not a number above 0"),
        (["--kind", "invers"], "--kind: 'invers' is unknown; did you mean 'inverse'?"),
        (["--kind", "x"], "--kind: 'x' is unknown; known are inverse, none"),
        (["--dry-run=1"], "--dry-run: takes no value, but got '1'"),
        (["word"], "unexpected word 'word'"),
    ],
)
def test_wrong_option_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*words)
    assert message in str(caught.value)


def test_names_may_stand_anywhere_among_options() -> None:
    parser = Parser("group", OPTIONS, "usage", "description")
    names, options = parser.parse_named(["a", "-n", "3", "b", "--dry-run", "c"])
    assert (names, options.number, options.dry_run) == (["a", "b", "c"], 3, True)
    with pytest.raises(UsageError, match="unknown option '--foo'"):
        parser.parse_named(["--foo", "a"])


def test_unknown_option_gets_the_advice_for_it_or_for_any() -> None:
    advice = {"": "it belongs to the script", "--node-rank": "leave it out"}
    parser = Parser("launch", OPTIONS, "usage", "description", advice=advice)
    for word, text in (("--node_rank=3", "leave it out"), ("--lr", "it belongs to the script"), ("--numbr", "did you")):
        with pytest.raises(UsageError, match=text):
            parser.parse([word])


def test_words_of_some_options_are_picked_with_their_values() -> None:
    options = (
        Option(("-n", "--num"), "", "N", int), Option(("-e", "--env"), "", "NAME", repeat=True), Option(("--yes",), ""),
    )  # fmt: skip
    given = ["-n", "2", "--env", "A=1", "--yes", "--env=B=--yes", "-n3", "-e", "--num"]
    kept = words_of(given, options, lambda option: option.flags[0] == "-e")
    assert kept == ["--env", "A=1", "--env=B=--yes", "-e", "--num"]
    assert words_of(given, options, lambda option: option.flags[0] != "-e") == ["-n", "2", "--yes", "-n3"]
