from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.partition import check_span, column_slots, part_bounds, span_bounds, window_slots

lengths = st.integers(1, 500)
parts = st.integers(1, 12)


@given(lengths, parts)
def test_contiguous_parts_tile_the_data_and_differ_by_at_most_one(length: int, num_parts: int) -> None:
    bounds = [part_bounds(length, num_parts, part) for part in range(num_parts)]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == length
    sizes = {stop - start for start, stop in bounds}
    assert max(sizes) - min(sizes) <= 1


@given(lengths, parts)
def test_windows_are_equally_large_cover_everything_and_repeat_at_most_one_sample_each(
    length: int, num_parts: int
) -> None:
    windows = [window_slots(length, num_parts, part, drop_last=False) for part in range(num_parts)]
    assert {len(window) for window in windows} == {-(-length // num_parts)}
    assert set(np.concatenate(windows)) == set(range(length))
    assert sum(map(len, windows)) - length <= num_parts - 1


@given(lengths, parts)
def test_windows_that_drop_are_disjoint_and_lose_only_the_remainder(length: int, num_parts: int) -> None:
    slots = np.concatenate([window_slots(length, num_parts, part, drop_last=True) for part in range(num_parts)])
    assert len(set(slots)) == len(slots) == length - length % num_parts


@given(lengths, st.integers(1, 64), st.lists(st.integers(0, 64), max_size=5), st.booleans())
def test_columns_have_equally_many_rows_and_cover_everything(
    length: int, batch: int, cuts: list[int], drop_last: bool
) -> None:
    edges = sorted({0, batch, *(cut for cut in cuts if cut < batch)})
    columns = list(pairwise(edges))
    slots = [column_slots(length, batch, one, drop_last=drop_last) for one in columns]
    rows = length // batch if drop_last else -(-length // batch)
    assert [len(one) for one in slots] == [rows * (stop - start) for start, stop in columns]
    together = np.concatenate(slots)
    if drop_last:
        assert len(set(together)) == len(together) == rows * batch
    else:
        assert set(together) == set(range(length))


@given(lengths, st.lists(st.floats(0.0, 1.0), max_size=6))
def test_neighbouring_spans_tile_the_data(length: int, cuts: list[float]) -> None:
    edges = sorted({0.0, 1.0, *cuts})
    bounds = [span_bounds(length, span) for span in pairwise(edges)]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == length


@pytest.mark.parametrize("span", [(0.5, 0.5), (0.6, 0.3), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 1.0)])
def test_impossible_span_is_refused(span: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="0 <= begin < end <= 1"):
        check_span(span)


@pytest.mark.parametrize(("num_parts", "part_index"), [(0, 0), (2, 2), (2, -1)])
def test_part_that_does_not_exist_is_refused(num_parts: int, part_index: int) -> None:
    with pytest.raises(ValueError, match=r"num_parts|part_index"):
        part_bounds(10, num_parts, part_index)
