"""What an error says when workers have set up different things."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest

from paceline.errors import ConfigError, KeyMismatchError, PacelineError, ProtocolError
from paceline.kvstore.agreement import (
    MAX_VARIANTS,
    Document,
    Fact,
    digest,
    disagreement,
    pack,
    representatives,
    squeeze,
    unsqueeze,
)
from paceline.wire.limits import MAX_GATHER_BYTES


def keys(*names: str, shape: str = "(3, 4) float32") -> list[Fact]:
    return [Fact(f"parameter {name!r}", shape, True) for name in names]


def error_of(by_rank: Sequence[Sequence[Fact] | None], what: str = "the optimizer") -> PacelineError:
    """Return the error of workers that say these facts; None has left."""
    packed = [b"" if facts is None else pack(Document(what, list(facts))) for facts in by_rank]
    ranks = representatives([one and digest(one) for one in packed])
    return disagreement({rank: unsqueeze(squeeze(packed[rank])) for rank in ranks}, ranks)


def lines_of(error: PacelineError) -> list[str]:
    first, *lines, last = str(error).splitlines()
    assert first == "the optimizer differs between the workers:"
    assert last == "All workers must use the same."
    return [line.removeprefix("  ") for line in lines]


def test_key_that_only_some_have_is_named_with_who_has_it() -> None:
    error = error_of([keys("w"), keys("w", "extra"), keys("w")])
    assert isinstance(error, KeyMismatchError)
    assert lines_of(error) == ["worker 1 has parameter 'extra' (3, 4) float32, which workers 0, 2 do not have"]
    assert lines_of(error_of([keys("w", "extra"), keys("w"), keys("w", "extra")])) == [
        "workers 0, 2 have parameter 'extra' (3, 4) float32, which worker 1 does not have"
    ]


def test_value_that_differs_is_told_with_who_has_which() -> None:
    facts = [Fact("lr of param group 0", one) for one in ("0.1", "0.1", "0.2")]
    error = error_of([[fact, *keys("w")] for fact in facts])
    assert isinstance(error, ConfigError)
    assert lines_of(error) == ["lr of param group 0 is 0.1 on workers 0-1 and 0.2 on worker 2"]


def test_value_that_differs_and_is_not_everywhere_is_told_in_one_line() -> None:
    error = error_of([keys("w"), keys("w", shape="(3,) float32"), []])
    assert isinstance(error, KeyMismatchError)
    assert lines_of(error) == [
        "parameter 'w' is (3, 4) float32 on worker 0 and (3,) float32 on worker 1 and not there on worker 2"
    ]


def test_order_of_keys_counts_from_the_first_that_differs() -> None:
    error = error_of([keys("a", "b", "c"), keys("a", "c", "b")])
    assert isinstance(error, KeyMismatchError)
    assert lines_of(error) == [
        "the order differs from position 1 on (counted from 0): it is parameter 'b' on worker 0 and "
        "parameter 'c' on worker 1"
    ]


def test_many_differences_are_cut_and_many_workers_too() -> None:
    lines = lines_of(error_of([keys(*map(str, range(15))), *[keys()] * 9]))
    assert lines[0] == "worker 0 has parameter '0' (3, 4) float32, which workers 1-9 do not have"
    assert len(lines) == 11
    assert lines[-1] == "and 5 more differences"


def test_who_has_left_is_not_compared() -> None:
    assert lines_of(error_of([keys("a"), None, keys()])) == [
        "worker 0 has parameter 'a' (3, 4) float32, which worker 2 does not have"
    ]


def test_workers_at_different_points_of_the_script_are_told_so() -> None:
    documents = {0: Document("the trainer", keys("a")), 1: Document("the optimizer", keys("a"))}
    error = disagreement(documents, {0: [0, 2], 1: [1]})
    assert isinstance(error, ConfigError)
    assert "workers 0, 2 set up the trainer\n  worker 1 set up the optimizer" in str(error)


def test_documents_that_did_not_travel_are_told_of() -> None:
    documents = {0: Document("the optimizer", keys("a")), 1: Document("the optimizer", keys())}
    error = disagreement(documents, {0: [0], 1: [1], 2: [2, 4], 3: [3]})
    assert lines_of(error)[-1] == "workers 2-4 differ too, in ways that are not compared here"
    assert "differ too" in str(disagreement({}, {0: [0], 1: [1]}))


def test_same_facts_in_the_same_order_have_the_same_digest() -> None:
    same = {digest(pack(Document("it", keys("a", "b")))) for _ in range(2)}
    other = {digest(pack(Document("it", keys("b", "a")))), digest(pack(Document("that", keys("a", "b"))))}
    assert len(same) == 1
    assert len(same | other) == 3
    assert all(len(one) == 32 for one in same | other)


def test_documents_of_all_variants_fit_into_one_gather() -> None:
    facts = [Fact(f"parameter 'layer{i}.weight'", f"({i}, {i * 7}) float32", True) for i in range(50_000)]
    packed = pack(Document("a large model", facts))
    assert 0 < len(squeeze(packed)) <= MAX_GATHER_BYTES // MAX_VARIANTS
    assert unsqueeze(squeeze(packed)).facts == facts
    noise = b"".join(digest(b"%d" % i) for i in range(40_000))
    assert squeeze(noise) == b"", "what is too large stays at home"


@pytest.mark.parametrize("data", [b"", b"noise", zlib.compress(b"\x93"), zlib.compress(bytes(1 << 20))])
def test_what_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        unsqueeze(data)
