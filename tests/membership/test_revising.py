"""The scheduler repeats the choice of ``dist_auto``, and regroups workers, or says what would be better."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from paceline.config import Settings
from paceline.hetero import Measured, Speed, StepNoise, choose
from paceline.hetero.files import choice_text, measured_text
from paceline.membership.following import Following
from paceline.membership.roster import MemberRecord
from paceline.wire import messages as m

STRAGGLER, SHORT = (0.6, 0.6, 0.6, 4.8), (0.02, 0.05, 0.02, 0.05)
MEASURED = Measured(tuple(Speed(0.2 * one, 0.025 * one) for one in STRAGGLER), 32, StepNoise(0.1), 0.04, 0.02)
SETTINGS = Settings(
    num_workers=4,
    groups="0 1 2; 3;",
    regroup_rounds=5,
    choice=choice_text(choose(MEASURED)),
    measured=measured_text(MEASURED),
)


def following(auto: str, **options: object) -> Following:
    one = Following(dataclasses.replace(SETTINGS, **options))  # type: ignore[arg-type]
    one.note_keys(m.Publish("kv0", [], auto=auto))
    return one


def roster(seconds: tuple[float, ...]) -> list[MemberRecord]:
    return [
        MemberRecord(
            m.Member("worker", rank, 0, "host", "id", 1, "", b""), b"", 0.0, 0, round=20, usual_s=one, usual_samples=32
        )
        for rank, one in enumerate(seconds)
    ]


def checks(one: Following, workers: list[MemberRecord], count: int) -> list[str]:
    """Let all workers make five rounds before each check; returns what was said."""
    said = []
    for _ in range(count):
        for worker in workers:
            worker.round += 5
        said.append(one.check(workers))
        assert one.check(workers) == "", "only once in five rounds"
    return said


def test_free_job_gets_groups_of_the_next_generation() -> None:
    one = following("free")
    workers = roster(STRAGGLER)
    assert checks(one, workers, 3) == ["", "", ""]
    assert (one.groups, one.sentences) == ((0, []), [])
    for worker, seconds in zip(workers, SHORT, strict=True):
        worker.usual_s = seconds
    first, second = checks(one, workers, 2)
    assert first == ""
    assert second.startswith("dist_auto: dist_gsync with groups 0 2, 1 3 from now on: ")
    assert one.groups == (1, [[0, 2], [1, 3]])
    assert one.sentences == [second.removeprefix("dist_auto: ")]
    workers[0].left = True
    checks(one, workers, 2)
    assert one.groups == (1, [[2], [1, 3]])


def test_fixed_job_gets_advice_and_keeps_its_groups() -> None:
    one = following("fixed")
    said = checks(one, roster(SHORT), 4)
    assert sum(map(bool, said)) == 1
    assert one.groups == (0, [])
    assert len(one.sentences) == 1
    assert one.sentences[0].startswith("dist_ksync with K = 2 and a pool of samples would be")


def test_store_that_can_change_groups_counts_more_than_one_that_cannot() -> None:
    one = following("fixed")
    one.note_keys(m.Publish("kv1", [], auto="free"))
    one.note_keys(m.Publish("kv2", [], auto="fixed"))
    assert checks(one, roster(SHORT), 2)[1]
    assert one.groups[0] == 1


def test_groups_of_dist_gsync_follow_by_themselves() -> None:
    one = following("")
    said = checks(one, roster((1, 2, 1, 2)), 2)
    assert said[1].startswith("the workers' speeds have changed")
    assert one.groups == (1, [[0, 2], [1, 3]])
    one.note_keys(m.Publish("kv1", [], auto="free"))
    assert one.groups == (1, [[0, 2], [1, 3]]), "generations go on"


@pytest.mark.parametrize("options", [{"regroup_rounds": 0}, {"choice": ""}, {"measured": ""}])
def test_nothing_is_repeated_that_is_not_known(options: dict[str, object]) -> None:
    one = following("free", **options)
    assert not any("dist_auto" in text for text in checks(one, roster(SHORT), 3))
    assert one.sentences == []


@pytest.mark.parametrize("what", ["scikit-learn", "measured"])
def test_lack_is_said_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "scikit-learn":
        monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    one = following("free", groups="", **({"measured": "{}"} if what == "measured" else {}))
    workers = roster(SHORT)
    said = one.check(workers)
    assert said.startswith("dist_auto stays as it is: ")
    assert checks(one, workers, 5) == [""] * 5
    assert one.groups == (0, [])


@pytest.mark.parametrize(
    ("spread", "is_advised"),
    [
        (m.Spread(175, 20, 8.0, 0.1), True),
        (m.Spread(175, 200, 8.0, 0.1), False),
        (m.Spread(175, 20, float("nan"), 0.1), False),
        (m.Spread(175, 20, 8.0, float("inf")), False),
    ],
)
def test_spikes_that_workers_count_end_lock_step(spread: m.Spread, is_advised: bool) -> None:
    measured = Measured(tuple(Speed(0.02, 0.0025) for _ in range(4)), 32, StepNoise(0.1))
    one = following("fixed", choice=choice_text(choose(measured)), measured=measured_text(measured))
    workers = roster((0.1, 0.1, 0.1, 0.1))
    for worker in workers:
        worker.spread = spread
    said = checks(one, workers, 2)
    assert ("11.4% of steps take 8 times as long" in said[1]) == is_advised
    assert bool(one.sentences) == is_advised


def test_times_that_cannot_be_are_not_compared() -> None:
    one, workers = following("free"), roster(SHORT)
    for seconds, samples in ((float("nan"), 1.0), (float("inf"), 1.0), (0.1, 0.0), (0.1, float("inf"))):
        workers[0].usual_s, workers[0].usual_samples = seconds, samples
        assert checks(one, workers, 3) == [""] * 3
