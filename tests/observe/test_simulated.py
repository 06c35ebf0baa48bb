"""Every fault with every noise, in lock step and in groups, equal and measured shares: who is named, and when.

``nox -s soak`` takes more trials: ``PACELINE_TEST_TRIALS``.
"""

from __future__ import annotations

import os
from collections import Counter
from statistics import median

import pytest

from tests.observe.simulated import ONSET, RIGHT, Scene, Simulation, outcome, scenes

TRIALS = int(os.environ.get("PACELINE_TEST_TRIALS", "1"))

#: Rounds from the onset to the verdict: the median, up to 10 % of noise. Pauses come now and then, and are named after
#: the second one: collections in every tenth round in the eleventh at the earliest.
WITHIN = dict.fromkeys(RIGHT, 5) | {"gc": 12, "stops": 35}


@pytest.mark.parametrize("fault", RIGHT)
def test_slow_process_and_cause_are_named(fault: str) -> None:
    found: Counter[str] = Counter()
    after, wrong = [], []
    for scene in scenes([fault]):
        for seed in range(TRIALS):
            said = Simulation(scene, seed).run(ONSET + 60)
            how, rounds = outcome(scene, said)
            found[how] += 1
            if how == "wrong":
                wrong.append((scene, seed, said))
            if how == "right" and scene.jitter <= 0.1:
                after.append(rounds)
    trials = found.total()
    assert found["wrong"] <= trials // 100, wrong
    assert found["right"] >= trials - max(2, trials // 20)
    assert median(after) <= WITHIN[fault]


def test_nobody_is_named_without_a_fault() -> None:
    for scene in scenes(["none"]):
        for seed in range(TRIALS):
            assert Simulation(scene, seed).run(ONSET + 60) == [], (scene, seed)


@pytest.mark.parametrize("groups", [False, True])
def test_chance_names_nobody_in_ten_thousand_rounds(groups: bool) -> None:
    """In these, a worker computes or waits for processors for long in several rounds one after the other."""
    assert Simulation(Scene("none", jitter=0.3, groups=groups), 1).run(10_000) == []
