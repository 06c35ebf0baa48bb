"""Names in texts: suggestions that are near in meaning, or none; and lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from paceline.cli.app import COMMANDS
from paceline.compression.codec_registry import known_codecs
from paceline.consistency.weighting import weighting_names
from paceline.kvstore import create
from paceline.kvstore.factory import store_types
from paceline.naming import listed, suggestion, workers_text
from paceline.updaters import known_names, make_spec


@pytest.mark.parametrize(
    ("names", "name", "nearest"),
    [
        (store_types, "dist_synk", "dist_sync"),
        (store_types, "dist_asynch", "dist_async"),
        (store_types, "devices", "device"),
        (store_types, "dist_ssp", "dist_ssync"),
        (known_names, "adanw", "adamw"),
        (known_names, "adgrad", "adagrad"),
        (known_names, "dcasg", "dcasgd"),
        (known_codecs, "top-k", "topk"),
        (weighting_names, "invers", "inverse"),
        (lambda: COMMANDS, "luanch", "launch"),
    ],
)
def test_slip_of_the_finger_gets_the_name_that_was_meant(
    names: Callable[[], Iterable[str]], name: str, nearest: str
) -> None:
    assert suggestion(name, names()) == f"; did you mean {nearest!r}?"


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (store_types, "dist_hogwild"),
        (store_types, "nccl"),
        (store_types, "p3store_dist"),
        (known_names, "adahessian"),
        (known_names, "shampoo"),
        (known_codecs, "zstd"),
        (lambda: COMMANDS, "fit"),
    ],
)
def test_other_thing_with_a_like_name_gets_no_suggestion(names: Callable[[], Iterable[str]], name: str) -> None:
    assert suggestion(name, names()) == f"; known are {', '.join(sorted(names()))}"


def test_stores_and_optimizers_suggest_nothing_at_random() -> None:
    with pytest.raises(ValueError, match=r"unknown store type 'dist_hogwild'; known are .*dist_async"):
        create("dist_hogwild")
    with pytest.raises(ValueError, match=r"'DDP' is no type of store: .* is started by `paceline launch --ddp`"):
        create("DDP")
    with pytest.raises(ValueError, match=r"unknown optimizer 'shampoo'; known are .*sgd"):
        make_spec("shampoo")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("momentum", "'sgd' with momentum=0.9"),
        ("nesterov", "MXNet's 'nag'"),
        ("ftml", "'adam'"),
        ("LANS", "'lamb'"),
        ("AdaBelief", "'adam'"),
        ("GroupAdaGrad", "'adagrad'"),
        ("LBSGD", "'lars'"),
    ],
)
def test_optimizer_of_another_library_gets_the_nearest_in_meaning(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"unknown optimizer '{name}'; nearest is .*{nearest}"):
        make_spec(name)


@pytest.mark.parametrize("name", ["SGD", "NAG", "Ftrl", "Signum", "DCASGD", "SGLD", "Adam", "LAMB", "LARS", "Nadam"])
def test_mxnets_names_are_known_as_mxnet_writes_them(name: str) -> None:
    assert make_spec(name).name == name.lower()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no worker"),
        ([3], "worker 3"),
        ([2, 0, 2], "workers 0, 2"),
        ([1, 0], "workers 0-1"),
        ([8, *range(7)], "workers 0-6, 8"),
        (range(64), "workers 0-63"),
        (range(0, 40, 2), "workers 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 8 more"),
    ],
)
def test_ranks_are_told_in_short(ranks: list[int], text: str) -> None:
    assert workers_text(ranks) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "a"), (3, "a, b, c"), (4, "a, b, c and 1 more"), (5, "a, b, c and 2 more")]
)
def test_the_first_names_are_listed_and_the_others_counted(count: int, text: str) -> None:
    assert listed("abcde"[:count]) == listed(iter("abcde"[:count])) == text
