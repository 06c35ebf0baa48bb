"""Values of intervals, against a list with one value per element."""

from __future__ import annotations

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.layout.interval_map import IntervalMap

LENGTH = 12
RANGE = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(lambda ends: (min(ends), max(ends)))
Span = tuple[int, int]


class AgainstElements(RuleBasedStateMachine):
    """Intervals whose values know their own range, beside the edges and one label per element."""

    def __init__(self) -> None:
        super().__init__()
        self.map = IntervalMap(LENGTH, (0, LENGTH, 0))
        self.labels = [0] * LENGTH
        self.edges = {0, LENGTH}

    def expected(self) -> list[tuple[int, int, int]]:
        edges = sorted(self.edges)
        return [(start, stop, self.labels[start]) for start, stop in pairwise(edges)]

    @staticmethod
    def split(value: tuple[int, int, int], at: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        start, stop, label = value
        assert 0 < at < stop - start, "only the inside of an interval is cut"
        return (start, start + at, label), (start + at, stop, label)

    @staticmethod
    def joined(left: tuple[int, int, int], right: tuple[int, int, int]) -> tuple[int, int, int] | None:
        assert left[1] == right[0], "only neighbours are joined"
        return (left[0], right[1], left[2]) if left[2] == right[2] else None

    @rule(span=RANGE)
    def cut(self, span: Span) -> None:
        start, stop = span
        self.edges |= {start, stop} if start < stop else set()
        made = self.map.cut(start, stop, self.split)
        assert made == [one for one in self.expected() if start <= one[0] < stop]

    @rule(span=RANGE, label=st.integers(0, 2))
    def set(self, span: Span, label: int) -> None:
        start, stop = span
        if start < stop:
            # Values of cut intervals would be wrong about their own range.
            self.map.cut(start, stop, self.split)
            self.map.set(start, stop, (start, stop, label))
            self.labels[start:stop] = [label] * (stop - start)
            self.edges = {edge for edge in self.edges if not start < edge < stop} | {start, stop}

    @rule(span=RANGE)
    def join(self, span: Span) -> None:
        start, stop = span
        self.map.join(start, stop, self.joined)
        equal = {edge for edge in self.edges - {0, LENGTH} if self.labels[edge - 1] == self.labels[edge]}
        self.edges -= {edge for edge in equal if start < edge < stop}

    @rule(span=RANGE)
    def ask(self, span: Span) -> None:
        start, stop = span
        overlapping = [one for one in self.expected() if one[0] < stop and start < one[1] and start < stop]
        assert self.map.touched(start, stop) == overlapping
        assert self.map.over(start, stop) == [(max(start, one[0]), min(stop, one[1]), one) for one in overlapping]

    @invariant()
    def is_what_is_expected(self) -> None:
        assert self.map.values == self.expected()
        assert len(self.map.values) == len(self.expected())


TestAgainstElements = AgainstElements.TestCase


@given(st.lists(st.tuples(RANGE, st.integers(0, 2)), max_size=20))
def test_ranges_of_equal_values_are_as_few_as_possible(steps: list[tuple[Span, int]]) -> None:
    found, labels = IntervalMap(LENGTH, 0), [0] * LENGTH
    for (start, stop), label in steps:
        found.put(start, stop, label)
        labels[start:stop] = [label] * (stop - start)
        assert found.values == [label for label, _ in groupby(labels)]
        assert [value for start, stop, value in found.over(0, LENGTH) for _ in range(start, stop)] == labels


def test_a_map_of_length_0_has_one_interval() -> None:
    found = IntervalMap(0, "all")
    found.put(0, 0, "other")
    assert found.cut(0, 0, lambda value, at: (value, value)) == ["all"]
    assert found.over(0, 0) == [(0, 0, "all")]


def test_an_empty_range_of_others_is_made_of_nothing() -> None:
    found = IntervalMap(4, "all")
    assert found.cut(2, 2, lambda value, at: (value, value)) == []
    assert found.over(2, 2) == []
    assert len(found.values) == 1
