"""Figures that a script reports: names, values, and room in heartbeats."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import paceline
from paceline.observe import meter, reports
from paceline.observe.reports import ReportedSteps, Reports
from paceline.wire import decode_request, encode
from paceline.wire import messages as m
from paceline.wire.limits import MAX_AMOUNT, MAX_FIGURES, MAX_REPORTS


def taken(own: Reports) -> list[tuple[int, float, dict[str, float]]]:
    return [(one.step, one.samples, one.figures) for one in own.take()]


def test_every_report_leaves_once_with_its_step_and_samples() -> None:
    own = Reports()
    own.add(3, 32.0, {"loss": 0.5})
    own.add(4, 16.0, {"loss": 0.25, "accuracy": 1})
    assert taken(own) == [(3, 32.0, {"loss": 0.5}), (4, 16.0, {"loss": 0.25, "accuracy": 1.0})]
    assert own.is_empty
    assert own.take() == []


def test_step_and_samples_are_those_of_the_last_push_by_default() -> None:
    own, account = Reports(), meter.Meter()
    meter.start(account)
    try:
        account.end_round(17, 48.0)
        own.add(None, None, {"loss": 0.5})
    finally:
        meter.stop(account)
    own.add(None, None, {"loss": 0.25})
    assert taken(own) == [(17, 48.0, {"loss": 0.5}), (0, 1.0, {"loss": 0.25})]


def test_total_of_steps_is_no_figure_and_tells_how_far_the_script_is() -> None:
    own = Reports()
    assert own.progress() is None
    own.add(3, 32.0, {}, total=10)
    assert own.progress() == m.StepsLeft(3, 10, None)
    own.add(4, 32.0, {"loss": 0.5}, total=10)
    assert taken(own) == [(4, 32.0, {"loss": 0.5})]
    own.add(1, 32.0, {"accuracy": 0.5})  # counts in its own way
    told = own.progress()
    assert told is not None
    assert (told.step, told.total) == (4, 10)
    for wrong in (0, -1, 2.0, True, 2**63):
        with pytest.raises(ValueError, match=f"total is {wrong!r}; it is the number of steps"):
            own.add(5, 32.0, {}, total=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([[0.5]], requires_grad=True)])
def test_numbers_of_all_kinds_are_read_in_the_call(value: object) -> None:
    own = Reports()
    own.add(0, 1.0, {"loss": value})
    if isinstance(value, torch.Tensor):
        value.detach().fill_(7.0)
    assert taken(own) == [(0, 1.0, {"loss": 0.5})]


@pytest.mark.parametrize("value", ["0.5", None, [1.0, 2.0], 10**400])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"loss is .*, not a number"):
        Reports().add(0, 1.0, {"loss": value})


def test_tensor_of_several_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="loss has 3 values; report one number"):
        Reports().add(0, 1.0, {"loss": torch.ones(3)})


@pytest.mark.parametrize("name", ["", "1st", "a b", "a\n", "ö", "x" * 65, 'a"'])
def test_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a figure"):
        Reports().add(0, 1.0, {name: 1.0})


def test_more_names_than_the_job_has_room_for_are_refused() -> None:
    own = Reports()
    own.add(0, 1.0, {f"figure/{number}": 1.0 for number in range(MAX_FIGURES)})
    with pytest.raises(ValueError, match="at most 64 names"):
        own.add(0, 1.0, {"one": 1.0})


@pytest.mark.parametrize(
    ("step", "samples"), [(-1, 1.0), (2**63, 1.0), (1.5, 1.0), (1, 0.0), (1, math.nan), (1, math.inf)]
)
def test_wrong_step_or_samples_are_refused(step: int, samples: float) -> None:
    with pytest.raises(ValueError, match=r"step is|samples is"):
        Reports().add(step, samples, {"loss": 1.0})


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor])
def test_step_and_samples_of_all_kinds_can_be_sent(kind: Callable[[int], Any]) -> None:
    """As ``samples=(labels != -100).sum()``."""
    own = Reports()
    own.add(kind(3), kind(8), {"loss": 1.0})
    assert [(type(step), step, type(samples), samples) for step, samples, _ in taken(own)] == [(int, 3, float, 8.0)]


@pytest.mark.parametrize("samples", ["8", [8]])
def test_samples_that_are_no_number_are_refused(samples: Any) -> None:
    with pytest.raises(TypeError, match=r"samples is .*, not a number"):
        Reports().add(1, samples, {"loss": 1.0})


def test_value_that_is_not_finite_is_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    own = Reports()
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            own.add(step, 1.0, {"loss": math.nan, "accuracy": 0.5})
        own.add(3, 1.0, {"loss": math.inf})
        found = taken(own)
    assert found == [(step, 1.0, {"accuracy": 0.5}) for step in range(3)]
    assert [one.getMessage() for one in caplog.records] == [
        "the reported figure 'loss' is nan at step 0; values that are not finite are left out"
    ]


def test_neighbours_are_joined_where_a_heartbeat_has_no_room() -> None:
    own = Reports()
    for step in range(1000):
        own.add(step, 1.0 + step % 2, {"loss": float(step)})
        if step % 500 == 0:
            own.add(step // 500, 1.0, {"accuracy": float(step)})
    found = taken(own)
    assert len(found) <= MAX_REPORTS
    loss = [one for one in found if "loss" in one[2]]
    samples = sum(one[1] for one in loss)
    assert samples == 1500
    expected = sum((1 + step % 2) * step for step in range(1000)) / 1500
    assert sum(one[1] * one[2]["loss"] for one in loss) / samples == pytest.approx(expected)
    assert [one[0] for one in loss] == sorted(one[0] for one in loss)
    assert loss[-1][0] == 999
    assert [one for one in found if "accuracy" in one[2]] == [
        (0, 1.0, {"accuracy": 0.0}),
        (1, 1.0, {"accuracy": 500.0}),
    ]


def test_reports_that_cannot_be_joined_leave_with_further_heartbeats() -> None:
    own = Reports()
    names = [f"n{number}" for number in range(MAX_FIGURES)]
    for one, two in zip(names, names[1:] + names[:1], strict=True):
        own.add(1, 1.0, {one: 1.0})
        own.add(2, 1.0, {one: 1.0, two: 1.0})
    first = taken(own)
    assert len(first) == MAX_REPORTS
    assert not own.is_empty
    second = taken(own)
    assert len(first) + len(second) == 2 * MAX_FIGURES


def test_process_that_no_heartbeat_empties_keeps_few() -> None:
    own = Reports()
    for step in range(10_000):
        own.add(step, 1.0, {"loss": 1.0})
    assert sum(one[1] for one in taken(own)) == 4096


def test_script_reports_by_one_call() -> None:
    reports.own().take()
    paceline.report(loss=0.5, step=3, samples=4)
    paceline.report(**{"val/loss": 0.25}, step=3, samples=4)
    assert taken(reports.own()) == [(3, 4.0, {"loss": 0.5}), (3, 4.0, {"val/loss": 0.25})]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_value_on_a_device_is_that_of_the_call_and_waits_for_nothing() -> None:
    own, busy = Reports(), torch.ones(4096, 4096, device="cuda")
    done = torch.cuda.Event()
    for _ in range(50):
        busy = busy @ busy / 4096
    value = busy[0, 0] * 0 + 0.5
    own.add(0, 1.0, {"loss": value})
    value.fill_(7.0)
    done.record()
    early = own.take()
    assert done.query() or early == []
    torch.cuda.synchronize()
    assert [one.figures for one in [*early, *own.take()]] == [{"loss": 0.5}]


@pytest.mark.parametrize(
    "report",
    [
        m.ReportedFigures(1, 1.0, {"loss": math.nan}),
        m.ReportedFigures(1, 1.0, {"loss": math.inf}),
        m.ReportedFigures(1, -1.0, {"loss": 1.0}),
        m.ReportedFigures(1, 1e300, {"loss": 1.0}),
        m.ReportedFigures(-1, 1.0, {"loss": 1.0}),
        m.ReportedFigures(1, 1.0, {"a\n": 1.0}),
        m.ReportedFigures(1, 1.0, {"x" * 65: 1.0}),
        m.ReportedFigures(1, 1.0, {f"n{number}": 1.0 for number in range(65)}),
    ],
)
def test_report_outside_of_its_limits_is_no_message(report: m.ReportedFigures) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(m.Heartbeat(1, reports=[report])), type=m.Heartbeat)


def test_heartbeat_with_too_many_reports_is_no_message() -> None:
    many = msgspec.msgpack.encode(m.Heartbeat(1, reports=[m.ReportedFigures(1, 1.0, {})] * (MAX_REPORTS + 1)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(many, type=m.Heartbeat)


# ---- how far a script is ---------------------------------------------------------------------------------------------


def reported(*steps: tuple[int, int, float]) -> ReportedSteps:
    one = ReportedSteps()
    for step, total, now in steps:
        one.note(step, total, now)
    return one


def test_time_that_is_left_is_that_of_the_steps_that_are_left() -> None:
    assert ReportedSteps().at(1.0) is None
    assert reported((0, 10, 100.0)).at(100.0) == m.StepsLeft(0, 10, None)
    assert reported((0, 10, 100.0), (4, 10, 108.0)).at(108.0) == m.StepsLeft(4, 10, 12.0)
    assert reported((0, 10, 100.0), (1, 10, 101.0), (4, 10, 108.0)).at(108.0) == m.StepsLeft(4, 10, 12.0)


def test_it_goes_down_between_reports_and_never_below_zero() -> None:
    one = reported((0, 10, 100.0), (5, 10, 110.0))
    assert one.at(113.0) == m.StepsLeft(5, 10, 7.0)
    assert one.at(500.0) == m.StepsLeft(5, 10, 0.0)


def test_a_job_that_goes_on_from_a_checkpoint_counts_its_own_steps_only() -> None:
    assert reported((500, 1000, 7.0), (510, 1000, 27.0)).at(27.0) == m.StepsLeft(510, 1000, 980.0)


def test_lower_step_and_another_total_begin_anew() -> None:
    assert reported((0, 10, 0.0), (8, 10, 8.0), (0, 10, 9.0)).at(9.0) == m.StepsLeft(0, 10, None)
    assert reported((0, 10, 0.0), (8, 10, 8.0), (8, 20, 9.0), (9, 20, 12.0)).at(12.0) == m.StepsLeft(9, 20, 33.0)


def test_total_that_is_never_reached_is_told_in_a_heartbeat_that_can_be_read() -> None:
    left = reported((0, sys.maxsize, 0.0), (1, sys.maxsize, 60.0)).at(60.0)
    found, _ = decode_request([encode(1, 0, m.Heartbeat(1, progress=left))])
    assert found.body == m.Heartbeat(1, progress=m.StepsLeft(1, sys.maxsize, MAX_AMOUNT))


def test_last_step_is_the_end() -> None:
    assert reported((10, 10, 0.0)).at(0.0) == m.StepsLeft(10, 10, 0.0)
    assert reported((0, 10, 0.0), (12, 10, 12.0)).at(12.0) == m.StepsLeft(12, 10, 0.0)
