"""Which batch a loop has now, of one walk or of several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.data import dealt
from paceline.data.dealt import Walk


@pytest.fixture(autouse=True)
def no_walks() -> Iterator[None]:
    dealt._open.clear()
    dealt._left.clear()
    yield
    dealt._open.clear()
    dealt._left.clear()


class Sampler:
    """Stands for one."""


ONE, OTHER = Sampler(), Sampler()


def samples(after: int = 0, last: dealt.DealtBatch | None = None) -> int | None:
    found = dealt.newest(after, last)
    return None if found is None else found.samples


def test_the_loop_has_the_batch_that_was_handed_out_last() -> None:
    walk = Walk(ONE)
    assert samples() is None
    walk.hand_out(3)
    walk.hand_out(4)
    assert samples() == 4
    assert samples(dealt.count()) is None
    assert samples(dealt.count(), walk.latest) == 4


def test_after_the_end_of_a_walk_no_batch_is_in_use_and_after_leaving_it_the_last_one() -> None:
    ended, left = Walk(ONE), Walk(OTHER)
    ended.hand_out(3)
    ended.end()
    assert samples(0, ended.latest) is None
    left.hand_out(4)
    left.leave()
    assert samples() == samples(dealt.count(), left.latest) == 4
    other = Walk(ONE)
    other.hand_out(5)
    assert samples() == 5
    other.end()
    assert samples() is None


def test_of_two_walks_that_of_the_sampler_of_the_last_push_counts_else_none() -> None:
    one, other = Walk(ONE), Walk(OTHER)
    one.hand_out(3)
    last = one.latest
    one.hand_out(4)
    other.hand_out(30)
    assert samples() is None
    assert samples(1, last) == 4


def test_two_new_walks_of_samplers_that_are_not_that_of_the_last_push_are_not_certain() -> None:
    gone, training, evaluation = Walk(Sampler()), Walk(ONE), Walk(OTHER)
    gone.hand_out(3)
    last = gone.latest
    assert last is not None
    gone.leave()
    training.hand_out(4)
    evaluation.hand_out(30)
    assert samples(last.number, last) is None
