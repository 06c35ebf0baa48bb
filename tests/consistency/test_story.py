"""A rule can tell what happened to its slot, in words."""

from __future__ import annotations

import copy

import pytest

from paceline.consistency import CheckedRule, Policy, Pushed, Refuse, Rule
from paceline.consistency.story import KEPT


def lines(rule: Rule, last: int = KEPT) -> list[str]:
    head, *rest = rule.story("'w'", last).split("\n")
    assert head == "what happened to 'w':"
    return [line.removeprefix("  ") for line in rest]


def test_story_of_a_round() -> None:
    rule = Rule(Policy("all"), 3)
    rule.push_sum([Pushed(0, 1, 8.0), Pushed(2, 1, 16.0)])
    assert lines(rule) == [
        "worker 0 pushed round 1 (8 samples, read version 0): cohort 0",
        "worker 2 pushed round 1 (16 samples, read version 0): cohort 0",
        "now version 0; cohort 0 has pushes of workers 0, 2 and waits for worker 1; unanswered: workers 0, 2",
    ]
    rule.push(1, 1, 0.5)
    assert lines(rule)[2:] == [
        "worker 1 pushed round 1 (0.5 samples, read version 0): cohort 0",
        "cohort 0 is complete (workers 0-2, 24.5 samples, staleness 1, weight 1): version 1",
        "answered workers 0-2 with version 1",
        "now version 1",
    ]


def test_story_of_stale_and_dropped_pushes() -> None:
    rule = Rule(Policy("each", age=1, weighting="inverse"), 2)
    for round in (1, 2):
        rule.push(0, round)
    rule.push(1, 1)
    rule.push(1, 1)
    rule.push(0, 3)
    rule.pull(1)
    rule.pull(1)
    assert lines(rule)[6:] == [
        "worker 1 pushed round 1 (read version 0, 2 behind): dropped as too old",
        "answered worker 1 with version 2",
        "worker 1 sent round 1 again",
        "worker 0 pushed round 3 (1 samples, read version 2): cohort 2",
        "cohort 2 is complete (worker 0, 1 samples, staleness 1, weight 1): version 3",
        "answered worker 0 with version 3",
        "worker 1 pulled version 3",
        "now version 3",
    ]
    rule = Rule(Policy("each", weighting="inverse"), 2)
    rule.push(0, 1)
    rule.push(1, 1)
    assert lines(rule)[3:5] == [
        "worker 1 pushed round 1 (1 samples, read version 0, 1 behind): cohort 1",
        "cohort 1 is complete (worker 1, 1 samples, staleness 2, weight 0.5): version 2",
    ]


def test_story_of_a_barrier_and_a_worker_that_left() -> None:
    rule = Rule(Policy("first", first=2), 4)
    rule.leave(3)
    rule.push(0, 1)
    rule.pause(2)
    assert lines(rule) == [
        "worker 3 left",
        "worker 0 pushed round 1 (1 samples, read version 0): cohort 0",
        "answered worker 0 with version 0",
        "worker 2 came to a barrier",
        "now version 0; cohort 0 has pushes of worker 0 and needs 2; at a barrier: worker 2; gone: worker 3",
    ]
    rule.pause(0)
    rule.pause(1)
    assert lines(rule, last=4) == [
        "worker 0 came to a barrier",
        "cohort 0 is complete (worker 0, 1 samples, staleness 1, weight 1): version 1",
        "worker 1 came to a barrier",
        "all live workers are at the barrier: it opens",
        "now version 1; gone: worker 3",
    ]


def test_refused_push_is_no_part_of_the_story() -> None:
    rule = Rule(Policy("all"), 2)
    assert isinstance(rule.push(0, 3)[0], Refuse)
    assert lines(rule) == ["now version 0"]


def test_story_keeps_the_last_events_only() -> None:
    rule = Rule(Policy("each"), 1)
    for round in range(1, 1001):
        rule.push(0, round)
    assert len(lines(rule)) == KEPT + 1
    assert lines(rule)[-2] == "answered worker 0 with version 1000"
    assert len(lines(rule, last=2)) == 3
    assert lines(rule, last=0) == ["now version 1000"]


def test_copy_has_the_story_and_goes_on_with_its_own() -> None:
    rule = Rule(Policy("all"), 2)
    rule.push(0, 1)
    other = rule.copy()
    assert other.story("'w'") == rule.story("'w'")
    other.push(1, 1)
    assert lines(other)[:1] == lines(rule)[:1]
    assert (len(lines(rule)), len(lines(other))) == (2, 5)
    assert type(CheckedRule(Policy("all"), 2).copy()) is CheckedRule


def test_joined_slot_has_the_longer_story_marked_where_they_differ() -> None:
    rule = Rule(Policy("each"), 2)
    rule.push(0, 1)
    other = rule.copy()
    same = rule.story("'w'")
    rule.join(other)
    assert rule.story("'w'") == same
    other.push(0, 1)
    before = lines(other)
    rule.join(other)
    mark = "this range was joined with its neighbour, which had other events before"
    assert lines(rule) == [*before[:-1], mark, "now version 1"]
    assert lines(other) == before


def test_checked_rule_fails_with_the_invariant_and_the_story() -> None:
    rule = CheckedRule(Policy("all"), 2)
    rule.push(0, 1)
    broken = copy.deepcopy(rule)
    broken.answered[0] = 1
    broken.read[1] = 7
    with pytest.raises(AssertionError, match=r"worker 1: read a version that does not exist\nwhat happened") as failure:
        broken.pause(1)
    assert "worker 0 pushed round 1" in str(failure.value)
