"""Bounds of a median from the order of the pairs."""

import random
import statistics

from benchmarks.observed import bounds


def test_bounds_of_30_pairs_are_those_of_the_table_of_the_sign_test():
    assert bounds(range(30)) == (9, 20)  # the 10th smallest and the 10th largest


def test_bounds_hold_the_median_as_often_as_they_say():
    draw = random.Random(1)
    found = [bounds([draw.gauss(1.0, 0.1) for _ in range(30)]) for _ in range(2000)]
    assert 0.94 < statistics.mean(low <= 1.0 <= high for low, high in found) < 0.98


def test_few_pairs_have_the_widest_bounds():
    assert bounds([1.0, 0.9, 1.1]) == (0.9, 1.1)
