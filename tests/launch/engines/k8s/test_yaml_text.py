from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.engines.k8s.manifests import documents

yaml_module = __import__("pytest").importorskip("yaml")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(st.text(max_size=6), VALUES, min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_reader_of_yaml_gets_the_objects_back(objects: list[dict[str, Any]]) -> None:
    assert list(yaml_module.safe_load_all(documents(objects))) == objects
