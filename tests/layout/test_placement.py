from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.layout.placement import ALIGNMENT, Bucket, KeySize, Layout, Part, place
from paceline.sim.models import arrays

POLICIES = st.sampled_from(["balanced", "layered", "hash"])
KEYS = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 2)), max_size=12).map(
    lambda sizes: [KeySize(f"layer{i}.weight", numel, tag) for i, (numel, tag) in enumerate(sizes)]
)
SERVERS = st.integers(1, 5)
BOUND = st.integers(1, 1500)
quick = settings(max_examples=60, deadline=None)


def load_of(layout: Layout, server: int) -> int:
    return sum(bucket.length for bucket in layout.buckets if bucket.server == server)


def check_layout(layout: Layout, keys: Sequence[KeySize]) -> None:
    """Assert that a layout covers every element of every key exactly once, in place, and that buckets are disjoint."""
    covered = [0] * len(keys)
    end = 0
    for bucket in layout.buckets:
        assert bucket.start >= end, "buckets overlap"
        end = bucket.start + bucket.length
        inner = 0
        for part in bucket.parts:
            assert part.start == inner, "a bucket has a hole"
            assert part.key_start == covered[part.key], "a key is covered out of order"
            assert bucket.start + part.start == layout.key_starts[part.key] + part.key_start, "a key is not contiguous"
            covered[part.key] += part.length
            inner += part.length
        assert inner == bucket.length
    assert end == layout.numel
    assert covered == [key.numel for key in keys], "a key is not covered exactly once"


@quick
@given(KEYS, SERVERS, BOUND, POLICIES, st.booleans())
def test_every_element_is_in_one_bucket_of_one_server(
    keys: list[KeySize], servers: int, bound: int, policy: str, whole: bool
) -> None:
    layout = place(keys, servers, bound=bound, policy=policy, whole=whole)  # type: ignore[arg-type]
    check_layout(layout, keys)
    assert all(0 <= bucket.server < servers for bucket in layout.buckets)
    assert layout == place(keys, servers, bound=bound, policy=policy, whole=whole)  # type: ignore[arg-type]


@quick
@given(KEYS, SERVERS, BOUND, POLICIES)
def test_no_bucket_is_too_large(keys: list[KeySize], servers: int, bound: int, policy: str) -> None:
    for factor in (0, 1, 4):
        layout = place(keys, servers, bound=bound, largest=factor * bound, policy=policy)  # type: ignore[arg-type]
        check_layout(layout, keys)
        assert all(bucket.length <= max(1, factor) * bound for bucket in layout.buckets)


@quick
@given(KEYS, SERVERS, BOUND, POLICIES)
def test_keys_up_to_the_bound_stay_whole(keys: list[KeySize], servers: int, bound: int, policy: str) -> None:
    layout = place(keys, servers, bound=bound, largest=3 * bound, policy=policy)  # type: ignore[arg-type]
    parts = [part for bucket in layout.buckets for part in bucket.parts]
    assert all(part.length == keys[part.key].numel for part in parts if keys[part.key].numel <= bound)


def test_buckets_grow_from_the_front_of_a_large_model() -> None:
    layout = place([KeySize(i, 10) for i in range(1000)], 1, bound=400, largest=1600)
    sizes = [bucket.length for bucket in layout.buckets]
    assert sizes[:7] == [50, 50, 100, 200, 400, 800, 1600]
    assert set(sizes[7:-1]) == {1600}


@pytest.mark.parametrize(("servers", "most"), [(2, 1.01), (4, 1.01), (8, 1.06), (16, 1.1), (32, 1.12)])
def test_loads_of_a_published_network_are_even(servers: int, most: float) -> None:
    keys = [KeySize(number, one.numel) for number, one in enumerate(arrays("resnet50"))]
    layout = place(keys, servers, bound=1_000_000)
    loads = [load_of(layout, server) for server in range(servers)]
    assert max(loads) <= most * sum(loads) / servers
    assert len(layout.buckets) <= max(50, 5 * servers), "each bucket costs its messages"


@pytest.mark.parametrize(
    ("sizes", "servers", "lengths"),
    [
        ([10] * 161, 2, [800, 810]),
        ([10] * 161, 3, [530, 530, 550]),
        ([10] * 161, 1, [1610]),
        ([32, 8, 24, 3], 2, [32, 35]),
        ([500, 20, 25_000, 50, 400_000, 500, 5000, 10], 2, [25_570, 405_510]),
        ([500, 20, 25_000, 50, 400_000, 500, 5000, 10], 4, [25_570, 400_000, 5510]),  # each server has something
        ([60, 60, 30], 2, [60, 60, 30]),  # no crumb
        ([500_000, 999_500, 600], 1, [500_000, 999_500, 600]),  # too large together
    ],
)  # fmt: skip
def test_a_small_model_has_one_bucket_for_each_server(sizes: list[int], servers: int, lengths: list[int]) -> None:
    layout = place([KeySize(number, one) for number, one in enumerate(sizes)], servers, bound=1_000_000)
    assert [bucket.length for bucket in layout.buckets] == lengths


def test_large_keys_are_cut_where_they_end() -> None:
    layout = place([KeySize("embedding", 4000), KeySize("head", 4000)], 1, bound=1000, largest=2000)
    assert [bucket.length for bucket in layout.buckets] == [2000] * 4


def test_servers_of_a_large_model_have_a_few_buckets_each() -> None:
    layout = place([KeySize(i, 100) for i in range(1600)], 4, bound=5000, largest=20_000)
    assert max(bucket.length for bucket in layout.buckets) == 160_000 / 4 / 4
    loads = [load_of(layout, server) for server in range(4)]
    assert max(loads) / min(loads) < 1.1


@quick
@given(KEYS, SERVERS, BOUND, POLICIES)
def test_whole_keys_are_never_split(keys: list[KeySize], servers: int, bound: int, policy: str) -> None:
    layout = place(keys, servers, bound=bound, policy=policy, whole=True)  # type: ignore[arg-type]
    parts = [part for bucket in layout.buckets for part in bucket.parts]
    assert sorted(part.key for part in parts) == list(range(len(keys)))
    assert all(part.length == keys[part.key].numel for part in parts)
    assert all(bucket.length <= bound or len(bucket.parts) == 1 for bucket in layout.buckets)


@quick
@given(KEYS, SERVERS, BOUND, POLICIES)
def test_tags_never_share_a_bucket(keys: list[KeySize], servers: int, bound: int, policy: str) -> None:
    layout = place(keys, servers, bound=bound, policy=policy)  # type: ignore[arg-type]
    assert all(len({keys[part.key].tag for part in bucket.parts}) == 1 for bucket in layout.buckets)


@quick
@given(KEYS, SERVERS, BOUND)
def test_balanced_loads_differ_by_at_most_the_largest_bucket(keys: list[KeySize], servers: int, bound: int) -> None:
    layout = place(keys, servers, bound=bound)
    loads = [load_of(layout, server) for server in range(servers)]
    assert max(loads) - min(loads) <= max((bucket.length for bucket in layout.buckets), default=0)


@quick
@given(KEYS, SERVERS, st.integers(ALIGNMENT, 4 * ALIGNMENT))
def test_buckets_begin_on_a_page(keys: list[KeySize], servers: int, bound: int) -> None:
    large = [*keys, KeySize("large", 30_000)]
    layout = place(large, servers, bound=bound)
    check_layout(layout, large)
    for bucket in layout.buckets:
        assert bucket.start * 2 % 4096 == 0


@quick
@given(KEYS, SERVERS, BOUND)
def test_layered_gives_the_lower_layers_to_the_fast_servers(keys: list[KeySize], servers: int, bound: int) -> None:
    speeds = [float(1 + server) for server in range(servers)]
    layout = place(keys, servers, bound=bound, policy="layered", speeds=speeds)
    speeds_in_order = [speeds[bucket.server] for bucket in layout.buckets]
    assert speeds_in_order == sorted(speeds_in_order, reverse=True)


def test_layered_shares_are_in_proportion_to_speed() -> None:
    layout = place([KeySize("w", 6000)], 2, bound=100, policy="layered", speeds=[1.0, 2.0])
    assert load_of(layout, 1) == pytest.approx(4000, abs=100)
    assert layout.buckets[0].server == 1


def test_hash_depends_on_the_name_alone() -> None:
    alone = place([KeySize("conv", 900)], 3, bound=1000, policy="hash").buckets[0].server
    between = place([KeySize("a", 900), KeySize("conv", 900), KeySize("z", 900)], 3, bound=1000, policy="hash")
    (server,) = [b.server for b in between.buckets if b.parts[0].key == 1]
    assert server == alone


def test_parts_of_a_large_key_go_round_the_servers() -> None:
    layout = place([KeySize("w", 900)], 3, bound=100, policy="hash")
    first = layout.buckets[0].server
    assert [bucket.server for bucket in layout.buckets] == [(first + i) % 3 for i in range(len(layout.buckets))]


def test_large_key_is_cut_into_equal_parts_for_all_servers() -> None:
    layout = place([KeySize("w", 4 * ALIGNMENT)], 4, bound=2 * ALIGNMENT)
    assert [(b.server, b.start, b.length) for b in layout.buckets] == [(s, ALIGNMENT * s, ALIGNMENT) for s in range(4)]


def test_small_keys_travel_together() -> None:
    keys = [KeySize(i, 10) for i in range(8)]
    layout = place(keys, 2, bound=1000)
    assert [len(bucket.parts) for bucket in layout.buckets] == [4, 4]
    assert {bucket.server for bucket in layout.buckets} == {0, 1}


def test_server_that_holds_something_already_gets_less() -> None:
    keys = [KeySize(i, 100) for i in range(4)]
    layout = place(keys, 2, bound=100, loads=[200, 0])
    assert (load_of(layout, 0), load_of(layout, 1)) == (100, 300)


def test_balanced_weighs_by_speed() -> None:
    layout = place([KeySize(i, 64) for i in range(9)], 2, bound=64, speeds=[1.0, 2.0])
    assert (load_of(layout, 0), load_of(layout, 1)) == (192, 384)


def test_no_keys_need_no_place() -> None:
    assert place([], 2, bound=10) == Layout(0, (), ())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"policy": "balance"}, "known are balanced, layered, hash"),
        ({"num_servers": 0}, "at least 1 server"),
        ({"bound": 0}, "bound of 1"),
        ({"speeds": [1.0]}, "one positive speed"),
        ({"speeds": [1.0, 0.0]}, "one positive speed"),
        ({"loads": [1]}, "one load for each of 2"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, object], why: str) -> None:
    arguments: dict[str, object] = {"num_servers": 2, "bound": 10} | options
    with pytest.raises(ValueError, match=why):
        place([KeySize("w", 5)], **arguments)  # type: ignore[arg-type]


def test_check_notices_holes_overlaps_and_strays() -> None:
    keys = [KeySize("w", 10)]
    good = place(keys, 1, bound=10)
    check_layout(good, keys)
    bucket = good.buckets[0]
    for damaged in (
        Layout(10, (bucket, bucket), (0,)),
        Layout(11, (bucket,), (0,)),
        Layout(10, (bucket,), (1,)),
        Layout(10, (Bucket(0, 0, 10, (Part(0, 0, 1, 10),)),), (0,)),
        Layout(10, (Bucket(0, 0, 10, (Part(0, 1, 0, 10),)),), (0,)),
        Layout(10, (dataclasses.replace(bucket, length=9),), (0,)),
        Layout(0, (), (0,)),
    ):
        with pytest.raises(AssertionError):
            check_layout(damaged, keys)
