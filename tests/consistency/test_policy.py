from __future__ import annotations

import pytest

from paceline import extensions
from paceline.consistency import Policy, policy_of, weighting_names
from paceline.consistency.weighting import find_weighting


@pytest.mark.parametrize(
    ("store_type", "options", "policy"),
    [
        ("dist_sync", {}, Policy("all")),
        ("dist_async", {}, Policy("each")),
        ("dist_async", {"weighting": "inverse"}, Policy("each", weighting="inverse")),
        ("dist_ssync", {}, Policy("each", bound=3)),
        ("dist_ssync", {"staleness": 0}, Policy("each", bound=0)),
        ("dist_gsync", {"groups": ((0, 1), (2, 3))}, Policy("groups", ((0, 1), (2, 3)), weighting="inverse")),
        (
            "dist_gsync",
            {"groups": ((0, 1), (2, 3)), "staleness": 2, "weighting": "none"},
            Policy("groups", ((0, 1), (2, 3)), bound=2),
        ),
        ("dist_ksync", {}, Policy("first", first=2)),
        ("dist_ksync", {"grace_s": 2.5}, Policy("first", first=2, grace_s=2.5)),
        ("dist_async", {"age": 3}, Policy("each", age=3)),
        ("dist_ssync", {"age": 3, "staleness": 5}, Policy("each", bound=5, age=3)),
        ("dist_ksync", {"first": 9, "age": 0}, Policy("first", first=9, age=0)),
        ("dist_ksync", {"weighting": "inverse", "age": 4}, Policy("first", first=2, weighting="inverse", age=4)),
    ],
)
def test_store_type_is_a_combination_of_three_settings(
    store_type: str, options: dict[str, object], policy: Policy
) -> None:
    assert policy_of(store_type, num_workers=4, **options) == policy  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("store_type", "options", "why"),
    [
        ("dist_snyc", {}, "did you mean 'dist_sync'"),
        ("dist_sync", {"weighting": "inverse"}, "no stale updates"),
        ("dist_gsync", {}, "needs groups"),
        ("dist_ssync", {"staleness": -1}, "0 or more"),
        ("dist_ksync", {"first": 5}, "1 to 4.*With age=0 it counts fresh gradients"),
        ("dist_ksync", {"first": 0}, "1 or more"),
        ("dist_ksync", {"grace_s": -1.0}, "grace_s is -1.0"),
        ("dist_ksync", {"grace_s": float("nan")}, "grace_s is nan"),
        ("dist_ksync", {"grace_s": 1.0, "age": 0}, "without an age limit"),
        ("dist_async", {"grace_s": 1.0}, "'each' has no time of grace"),
        ("dist_async", {"age": -1}, "0 or more"),
        ("dist_sync", {"age": 3}, "dropped one by one.*dist_async"),
        ("dist_gsync", {"groups": ((0, 1), (2, 3)), "age": 3}, "dropped one by one.*dist_async"),
        ("dist_async", {"weighting": "invers"}, "did you mean 'inverse'"),
        ("dist_async", {"weighting": "zzz"}, "known are inverse"),
        ("dist_gsync", {"groups": ((0, 1), (1, 2, 3))}, "worker 1 is in more than one place"),
        ("dist_gsync", {"groups": ((0, 1), (3,))}, "worker 2 is in no group"),
        ("dist_gsync", {"groups": ((0, 1), (2, 3, 4))}, "worker 4 is not part"),
        ("dist_gsync", {"groups": ((0, 1), (), (2, 3))}, "no members"),
    ],
)
def test_settings_that_do_not_fit_are_refused(store_type: str, options: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        policy_of(store_type, num_workers=4, **options)  # type: ignore[arg-type]


def test_unknown_merge_is_refused() -> None:
    with pytest.raises(ValueError, match=r"merge 'most'.*all, each, groups, first"):
        Policy("most").check(2)  # type: ignore[arg-type]


def test_units_are_who_steps_together() -> None:
    assert Policy("all").unit_of(3) == [0, 0, 0]
    assert Policy("groups", ((0, 2), (1,))).unit_of(3) == [0, 1, 0]
    assert Policy("each").unit_of(3) == Policy("first", first=1).unit_of(3) == [0, 1, 2]


def test_registered_weighting_is_used_and_its_name_is_taken() -> None:
    name = "square of the inverse"
    extensions.register("weighting", name)(lambda staleness, history: staleness**-2)
    assert name in weighting_names()
    assert find_weighting(name)(2, (1, 1.0)) == 0.25
    for taken in (name, "none"):
        with pytest.raises(ValueError, match="registered already"):
            extensions.register("weighting", taken)(lambda staleness, history: 1.0)
