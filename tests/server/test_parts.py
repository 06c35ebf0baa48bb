"""Which parts of a slot workers have seen, against sets of elements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.readers import Parts

LENGTH = 10
RANGE = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).filter(lambda ends: ends[0] < ends[1])
STEP = st.tuples(st.integers(0, 1), st.integers(0, 1), RANGE)


@given(steps=st.lists(STEP, max_size=12), cut=st.integers(1, LENGTH - 1), when=st.integers(0, 12))
def test_a_worker_has_seen_a_slot_when_it_has_seen_all_elements_at_one_version_also_after_a_cut_and_a_join(
    steps: list[tuple[int, int, tuple[int, int]]], cut: int, when: int
) -> None:
    parts, version = Parts(), 0
    seen: dict[int, tuple[int, set[int]]] = {}
    for number, (worker, later, (start, stop)) in enumerate(steps):
        if number == when:
            parts = parts.within(0, cut).beside(parts.within(cut, LENGTH), cut)
        version += later
        last, elements = seen.get(worker, (version, set()))
        elements = (elements if last == version else set()) | set(range(start, stop))
        assert parts.add(worker, version, start, stop, LENGTH) == (len(elements) == LENGTH)
        seen[worker] = version, elements if len(elements) < LENGTH else set()


def test_parts_of_a_slot_without_elements_are_all_of_it() -> None:
    assert Parts().add(0, 1, 0, 0, 0)


def test_the_newer_parts_count_where_neighbours_saw_different_versions() -> None:
    old, new = Parts(), Parts()
    assert not old.add(0, 1, 0, 4, 5)
    assert not new.add(0, 2, 0, 4, 5)
    assert not old.beside(new, 5).add(0, 2, 9, 10, 10)
    assert old.beside(new, 5).within(5, 10).add(0, 2, 4, 5, 5)
    assert new.beside(old, 5).add(0, 2, 4, 10, 10)
