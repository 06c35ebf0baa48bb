from __future__ import annotations

from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.compression import make
from paceline.server.merge import Accumulator, Contribution, Encoded, Scratch
from paceline.updaters import StepOptions

F32 = torch.float32


def values(worker: int, numel: int = 33) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(worker)) * 10.0 ** (worker % 5)


def merged(
    order: list[int], samples: dict[int, float], mean: bool, expected: list[int], weight: float = 1.0
) -> torch.Tensor | None:
    accumulator = Accumulator([expected], mean, F32, Scratch())
    for worker in order:
        accumulator.add(worker, Contribution(values(worker), samples[worker], None, borrowed=False))
    result = accumulator.result(weight)
    return None if result is None else result[0] * result[1]


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(range(5)), st.booleans(), st.lists(st.sampled_from([0.0, 1.0, 16.0, 48.0]), min_size=5, max_size=5)
)
def test_sum_is_the_same_bit_for_bit_in_any_order_of_arrival(order: list[int], mean: bool, counts: list[float]) -> None:
    samples = dict(enumerate(counts))
    in_order = merged(list(range(5)), samples, mean, list(range(5)))
    shuffled = merged(order, samples, mean, list(range(5)))
    if in_order is None or shuffled is None:
        assert shuffled is in_order
        assert not any(counts)
    else:
        assert torch.equal(in_order, shuffled)


def in_order_of_ranks(workers: list[int]) -> torch.Tensor:
    return reduce(torch.add, [values(worker) for worker in sorted(workers)])


def test_the_order_of_three_addends_shows_in_their_sum() -> None:
    assert not torch.equal(in_order_of_ranks([0, 1, 2]), values(2) + values(1) + values(0))


@pytest.mark.parametrize("present", [[0, 1, 3], [3, 1, 0], [3, 2, 1], [3, 0], [1], [0]])
def test_sum_without_those_who_left_is_still_in_the_order_of_ranks(present: list[int]) -> None:
    got = merged(present, dict.fromkeys(range(4), 1.0), False, [0, 1, 2, 3])
    assert got is not None
    assert torch.equal(got, in_order_of_ranks(present))


def test_mean_of_48_and_16_samples_counts_them_three_to_one() -> None:
    for order in ([0, 1], [1, 0]):
        got = merged(order, {0: 16.0, 1: 48.0}, True, [0, 1])
        assert got is not None
        torch.testing.assert_close(got, 0.25 * values(0) + 0.75 * values(1))


def test_mean_of_whole_numbers_is_exact() -> None:
    accumulator = Accumulator([[0, 1]], True, F32, Scratch())
    accumulator.add(1, Contribution(torch.tensor([4.0, 8.0, -4.0]), 48.0, None, False))
    accumulator.add(0, Contribution(torch.tensor([8.0, 0.0, 4.0]), 16.0, None, False))
    result = accumulator.result(1.0)
    assert result is not None
    assert (result[0] * result[1]).tolist() == [5.0, 6.0, -2.0]


def test_weight_of_a_stale_update_scales_the_result() -> None:
    whole, half = (merged([0, 1], {0: 16.0, 1: 48.0}, True, [], weight=w) for w in (1.0, 0.5))
    assert whole is not None
    assert half is not None
    torch.testing.assert_close(half, 0.5 * whole)


def test_worker_without_samples_adds_nothing_and_nobody_with_samples_is_no_update() -> None:
    alone = merged([0], {0: 16.0}, True, [0])
    beside = merged([1, 0, 2], {0: 16.0, 1: 0.0, 2: 0.0}, True, [0, 1, 2])
    assert alone is not None
    assert beside is not None
    assert torch.equal(alone, beside)
    assert merged([0, 1], {0: 0.0, 1: 0.0}, True, [0, 1]) is None
    assert merged([0, 1], {0: 0.0, 1: 0.0}, False, [0, 1]) is None


def test_values_of_a_worker_without_samples_may_be_anything() -> None:
    accumulator = Accumulator([[0, 1]], True, F32, Scratch())
    accumulator.add(0, Contribution(torch.tensor([float("nan"), 0.0]), 0.0, None, False))
    accumulator.add(1, Contribution(torch.tensor([1.0, 2.0]), 4.0, None, False))
    result = accumulator.result(1.0)
    assert result is not None
    assert (result[0] * result[1]).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_borrowed_memory_is_read_and_never_written(workers: int, mean: bool, weight: float, dtype: torch.dtype) -> None:
    owned = [values(worker).to(dtype) for worker in range(workers)]
    kept = [one.clone() for one in owned]
    accumulator = Accumulator([list(range(workers))], mean, F32, Scratch())
    for worker, one in enumerate(owned):
        accumulator.add(worker, Contribution(one, 1.0 + worker, None, borrowed=True))
    result = accumulator.result(weight)
    assert result is not None
    if result[1] != 1.0:
        # Whoever applies a scale may do it in place.
        result[0].mul_(result[1])
    assert all(torch.equal(one, before) for one, before in zip(owned, kept, strict=True))
    assert result[0].dtype == F32


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_options_are_those_of_the_lowest_rank_that_brings_some(order: list[int]) -> None:
    options = [None, StepOptions([{"lr": 2.0}]), StepOptions([{"lr": 3.0}])]
    accumulator = Accumulator([[0, 1, 2]], False, F32, Scratch())
    for worker in order:
        accumulator.add(worker, Contribution(torch.ones(1), 1.0, options[worker], False))
    assert accumulator.options == options[1]


@pytest.mark.parametrize("order", [[3, 2, 1], [1, 2, 3], [3, 2, 1, 0]])
def test_those_who_were_not_expected_come_last_in_the_order_of_ranks(order: list[int]) -> None:
    got = merged(order, dict.fromkeys(range(4), 1.0), False, [0])
    assert got is not None
    assert torch.equal(got, in_order_of_ranks(order))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_absent_is_where_nobody_with_samples_has_a_gradient(order: list[int]) -> None:
    absent = [((0, 4),), ((2, 6),), ()]
    accumulator = Accumulator([[0, 1, 2]], True, F32, Scratch())
    for worker in order:
        samples = 0.0 if worker == 2 else 1.0
        accumulator.add(worker, Contribution(torch.zeros(6), samples, None, False, absent=absent[worker]))
    assert accumulator.absent == ((2, 4),)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("who", [0, 1])
def test_one_who_says_that_the_update_must_not_be_made_is_enough(order: list[int], who: int) -> None:
    accumulator = Accumulator([[0, 1]], True, F32, Scratch())
    for worker in order:
        accumulator.add(worker, Contribution(torch.zeros(3), 1.0, None, False, skip=worker == who))
    assert accumulator.skip


@pytest.mark.parametrize("encoded", [False, True])
def test_worker_that_contributes_twice_counts_with_the_samples_of_both(encoded: bool) -> None:
    codec = make({"type": "fp16"})
    assert codec is not None
    accumulator = Accumulator([], True, F32, Scratch())
    for worker, value, samples in ((0, 4.0, 1.0), (1, 8.0, 2.0), (0, 2.0, 5.0)):
        one: torch.Tensor | Encoded = torch.full((3,), value)
        if encoded:
            one = Encoded(codec, codec.encode(torch.full((3,), value), codec.new_state(3)), 3)
        accumulator.add(worker, Contribution(one, samples, None, False))
    result = accumulator.result(1.0)
    assert result is not None
    assert (result[0] * result[1]).tolist() == pytest.approx([(4.0 + 16.0 + 10.0) / 8.0] * 3)
    assert accumulator.shares == {0: 6.0, 1: 2.0}


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(4)), st.integers(0, 4), st.integers(1, 32), st.booleans(), st.booleans())
def test_cut_in_the_middle_of_a_cohort_changes_no_bit(
    order: list[int], before: int, at: int, mean: bool, ordered: bool
) -> None:
    expected = list(range(4)) if ordered else []
    samples = {worker: 1.0 + worker for worker in range(4)}
    whole = merged(order, samples, mean, expected)
    accumulator = Accumulator([expected], mean, F32, Scratch())
    for worker in order[:before]:
        accumulator.add(worker, Contribution(values(worker), samples[worker], None, False))
    halves = zip(accumulator.split(at), (slice(None, at), slice(at, None)), strict=True)
    parts = []
    for half, part in halves:
        for worker in order[before:]:
            half.add(worker, Contribution(values(worker)[part], samples[worker], None, False))
        result = half.result(1.0)
        assert result is not None
        parts.append(result[0] * result[1])
    assert whole is not None
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1]])
def test_encoded_values_count_as_what_they_decode_to(order: list[int], mean: bool) -> None:
    codec = make({"type": "2bit", "threshold": 3.0})
    assert codec is not None
    encoded, plain = Accumulator([[0, 1, 2]], mean, F32, Scratch()), Accumulator([[0, 1, 2]], mean, F32, Scratch())
    for worker in order:
        payload = codec.encode(values(worker), codec.new_state(33))
        one = Encoded(codec, payload, 33)
        encoded.add(worker, Contribution(one, 1.0 + worker, None, borrowed=False))
        plain.add(worker, Contribution(one.decoded(), 1.0 + worker, None, borrowed=False))
    got, wanted = encoded.result(0.5), plain.result(0.5)
    assert got is not None
    assert wanted is not None
    torch.testing.assert_close(got[0] * got[1], wanted[0] * wanted[1])


def test_encoded_values_can_be_cut_before_and_after_they_are_summed() -> None:
    codec = make({"type": "int8"})
    assert codec is not None
    accumulator = Accumulator([[0, 1]], False, F32, Scratch())
    payloads = [codec.encode(values(worker), codec.new_state(33)) for worker in range(2)]
    accumulator.add(0, Contribution(Encoded(codec, payloads[0], 33), 1.0, None, borrowed=False))
    for part, half in zip((slice(None, 10), slice(10, None)), accumulator.split(10), strict=True):
        second = Encoded(codec, payloads[1], 33).decoded()[part]
        half.add(1, Contribution(second, 1.0, None, borrowed=False))
        result = half.result(1.0)
        assert result is not None
        assert torch.equal(result[0], sum(Encoded(codec, one, 33).decoded()[part] for one in payloads))


@settings(max_examples=60, deadline=None)
@given(
    order=st.permutations(range(6)),
    mean=st.booleans(),
    counts=st.lists(st.sampled_from([0.0, 1.0, 16.0, 48.0]), min_size=6, max_size=6),
    summed=st.sets(st.integers(0, 2)),
    present=st.sets(st.integers(0, 5), min_size=1),
)
def test_sum_over_a_host_that_is_made_elsewhere_changes_no_bit(
    order: list[int], mean: bool, counts: list[float], summed: set[int], present: set[int]
) -> None:
    hosts = [[0, 3], [1, 2], [4, 5]]
    direct, mixed = Accumulator(hosts, mean, F32, Scratch()), Accumulator(hosts, mean, F32, Scratch())
    for worker in order:
        [number] = [number for number, host in enumerate(hosts) if worker in host]
        mates = [one for one in hosts[number] if one in present]
        if worker in present:
            direct.add(worker, Contribution(values(worker), counts[worker], None, False))
            if number not in summed:
                mixed.add(worker, Contribution(values(worker), counts[worker], None, False))
        if number in summed and mates and worker == mates[-1]:
            elsewhere = Accumulator([mates], mean, F32, Scratch())
            for mate in reversed(mates):
                elsewhere.add(mate, Contribution(values(mate), counts[mate], None, True))
            total, unit = elsewhere.sum() or (torch.zeros(33), 1.0)
            assert elsewhere.shares == {mate: counts[mate] for mate in mates}
            samples = sum(counts[mate] for mate in mates)
            mixed.add(mates[0], Contribution(total, samples, None, False, unit, tuple(mates[1:])))
    one, other = direct.result(1.0), mixed.result(1.0)
    if one is None or other is None:
        assert one is other
    else:
        assert torch.equal(one[0] * one[1], other[0] * other[1])
