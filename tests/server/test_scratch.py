"""Memory for sums is lent again, and never to two at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.merge import Accumulator, Contribution, Scratch

F32 = torch.float32


@given(st.lists(st.one_of(st.integers(1, 40), st.none()), max_size=40))
def test_what_is_lent_is_large_enough_and_not_lent_twice(wishes: list[int | None]) -> None:
    """Numbers borrow that many elements, None gives back what was borrowed first; content must survive meanwhile."""
    scratch, lent, mark = Scratch(), [], 0.0
    for wish in wishes:
        if wish is not None:
            mark += 1.0
            lent.append((scratch.lend(wish, F32), wish, mark))
            assert lent[-1][0].numel() >= wish
            lent[-1][0].fill_(mark)
        elif lent:
            scratch.give_back(lent.pop(0)[0])
        assert all((one[:numel] == content).all() for one, numel, content in lent)


def test_one_after_the_other_shares_one_buffer() -> None:
    scratch, places = Scratch(), set()
    for numel in (40, 7, 40, 33):
        lent = scratch.lend(numel, F32)
        places.add(lent.data_ptr())
        scratch.give_back(lent)
    assert len(places) == 1
    scratch.give_back(scratch.lend(41, F32))
    assert scratch.lend(1, F32).numel() == 41


def test_types_do_not_mix() -> None:
    scratch = Scratch()
    scratch.give_back(scratch.lend(8, F32))
    assert scratch.lend(4, torch.float64).dtype == torch.float64


def test_sums_of_many_buckets_one_after_the_other_take_one_buffer() -> None:
    scratch, sums = Scratch(), set()
    for _ in range(5):
        accumulator = Accumulator([[0, 1]], False, F32, scratch)
        for worker in range(2):
            accumulator.add(worker, Contribution(torch.full((9,), 1.0 + worker), 1.0, None, borrowed=True))
        result = accumulator.result(1.0)
        assert result is not None
        assert result[0].tolist() == [3.0] * 9
        sums.add(result[0].data_ptr())
        accumulator.close()
    assert len(sums) == 1


def test_values_of_our_own_are_summed_into() -> None:
    first = torch.ones(9)
    accumulator = Accumulator([[0, 1]], False, F32, Scratch())
    accumulator.add(0, Contribution(first, 1.0, None, borrowed=False))
    accumulator.add(1, Contribution(torch.ones(9), 1.0, None, borrowed=True))
    result = accumulator.result(1.0)
    assert result is not None
    assert result[0].data_ptr() == first.data_ptr()
    assert first.tolist() == [2.0] * 9
