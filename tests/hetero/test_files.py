"""Files of speeds, groups and data sharding."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.consistency import Policy, parse_groups
from paceline.data import read_spans
from paceline.hetero import Choice, Measured, Speed, StepNoise, WorkerRound
from paceline.hetero.files import (
    choice_text,
    groups_text,
    measured_text,
    parse_choice,
    parse_measured,
    parse_report,
    parse_speeds,
    parse_steps,
    report_text,
    sharding_text,
    steps_line,
    steps_text,
)


def test_speeds_are_read_in_order() -> None:
    assert parse_speeds("# measured\nb:0 0.5 # slow\n\na 1e-1\n") == {"b:0": 0.5, "a": 0.1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no lines"),
        ("a", "line 1: 'a' is not"),
        ("a 1\nb fast", "line 2"),
        ("a 0", "line 1"),
        ("a nan", "line 1"),
        ("a 1e-320", "line 1"),
        ("a 1e300", "line 1"),
        ("a 1\na 2", "'a' occurs twice"),
        pytest.param(1000 * "a b ", r"line 1: 'a b .{10,100}\[...\]' is not", id="long"),
    ],
)
def test_wrong_line_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_speeds(text)


def test_groups_are_written_as_they_are_read() -> None:
    text = groups_text(((1, 2), (0,)), {"slow": 4.0, "fast:0": 1.0, "fast:1": 2.0})
    assert text == "fast:0 fast:1  # 1.5 s per step\nslow  # 4 s per step\n"
    assert parse_groups(text) == [["fast:0", "fast:1"], ["slow"]]


def test_sharding_is_in_proportion_to_speed_and_covers_everything(tmp_path: Path) -> None:
    path = tmp_path / "data_sharding"
    path.write_text(sharding_text([1.0, 2.0, 4.0]))
    spans = read_spans(path, 3)
    assert (spans[0][0], spans[-1][1]) == (0, 1)
    assert [end - begin for begin, end in spans] == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=1e-5)
    assert [spans[0][1], spans[1][1]] == [spans[1][0], spans[2][0]]
    path.write_text(sharding_text([0.123456789] * 40))
    assert len(read_spans(path, 40)) == 40


def test_measured_steps_come_back() -> None:
    steps = [[WorkerRound(32, seconds, 0.25)] * 5 + [WorkerRound(8, seconds / 2, 0.25)] * 5 for seconds in (1.0, 2.0)]
    measured = parse_steps(steps_text([steps_line(one) for one in steps], 0.125, hands_out=True))
    assert measured.seconds == pytest.approx([1.0, 2.0])
    assert [one.fixed_s for one in measured.workers] == pytest.approx([1 / 3, 2 / 3])
    assert (measured.batch, measured.exchange_s, measured.update_s, measured.hands_out) == (32, 0.25, 0.125, True)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": [], "update_s": 0, "hands_out": true}'])
def test_other_text_is_no_file_of_steps(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_steps(text)


@pytest.mark.parametrize(
    "policy", [Policy(), Policy("first", first=2, lr_scale="sample"), Policy("groups", ((0, 2), (1,)))]
)
def test_choice_comes_back(policy: Policy) -> None:
    choice = Choice("dist_some", policy, "pool", 'because "3" > 2; so, it is')
    assert parse_choice(choice_text(choice), 3) == choice
    assert "\n" not in choice_text(choice)


def test_choice_of_another_job_is_refused() -> None:
    with pytest.raises(ValueError, match="K is 4"):
        parse_choice(choice_text(Choice("dist_ksync", Policy("first", first=4), "pool", "")), 3)
    with pytest.raises(ValueError, match="is not what dist_auto should do"):
        parse_choice("{}", 3)


def test_what_was_measured_comes_back() -> None:
    measured = Measured((Speed(0.25, 0.0078125), Speed(0.0, 1e-7)), 32, StepNoise(0.1, 0.05, 8.0), 0.5, 0.125, False)
    assert parse_measured(measured_text(measured), 2) == measured
    assert "\n" not in measured_text(measured)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("0.25", "-0.25", "finite number"),
        ("0.25", "NaN", "finite number"),
        ('"batch":32', '"batch":0', "cannot be empty"),
        ("[0.25,0.5]", "[0.0,0.0]", "cannot be empty"),
        ('"noise"', '"nose"', "KeyError"),
        ("{", "[", "JSONDecodeError"),
        (",[0.25,0.5]]", "]", "1 workers were measured for dist_auto, and the job has 2"),
    ],
)
def test_what_was_measured_of_another_job_is_refused(old: str, new: str, why: str) -> None:
    text = measured_text(Measured((Speed(0.5, 0.5), Speed(0.25, 0.5)), 32))
    assert old in text
    with pytest.raises(ValueError, match=why):
        parse_measured(text.replace(old, new, 1), 2)


def test_report_is_read_from_the_output_of_a_job() -> None:
    workers = [f"h{rank}:0 0.1\n{steps_line([WorkerRound(8, 0.1 + rank, 0.2)] * (4 - rank))}" for rank in range(2)]
    text = report_text(workers, 0.125, 5000, "dist_sync")
    lines = [f"[worker 0] 12 %{line}" for line in text.splitlines()]
    found = parse_report("\n".join(["[worker 1] hello", *lines, "[worker 1] bye"]))
    assert found is not None
    assert found.names == ("h0:0", "h1:0")
    assert found.steps == ((WorkerRound(8, 0.1, 0.2),) * 3, (WorkerRound(8, 1.1, 0.2),) * 3), "rounds that all made"
    assert (found.update_s, found.elements, found.store_type) == (0.125, 5000, "dist_sync")
    assert parse_report("[worker 0] trained") is None
