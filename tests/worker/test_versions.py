"""Versions of ranges, against a list with one version per element."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.worker.block import Versions

LENGTH = 20
RANGE = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)


@given(st.lists(st.tuples(RANGE, st.integers(0, 5), RANGE), max_size=30))
def test_every_element_has_the_version_that_was_set_last(steps: list[tuple[list[int], int, list[int]]]) -> None:
    versions, expected = Versions(LENGTH), [0] * LENGTH
    for (start, stop), version, (first, last) in steps:
        versions.set(start, stop - start, version)
        expected[start:stop] = [version] * (stop - start)
        assert versions.of(first, last - first) == set(expected[first:last])


def test_an_empty_bucket_has_no_versions() -> None:
    versions = Versions(0)
    versions.set(0, 0, 3)
    assert versions.of(0, 0) == set()


def test_ranges_of_one_version_are_one() -> None:
    versions = Versions(LENGTH)
    for start in range(LENGTH):
        versions.set(start, 1, 1)
    assert len(versions._versions) == 1
